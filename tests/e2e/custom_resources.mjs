// Reads a JSON list of custom resources on stdin and validates each by its definition.
import * as monitoring from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
import * as keda from "@kubernetes-models/keda/keda.sh/v1alpha1";

const groups = { "monitoring.coreos.com/v1": monitoring, "keda.sh/v1alpha1": keda };

let text = "";
for await (const piece of process.stdin) text += piece;
let failed = 0;
for (const resource of JSON.parse(text)) {
  const name = `${resource.kind} ${resource.metadata.name}`;
  try {
    const Kind = groups[resource.apiVersion]?.[resource.kind];
    if (!Kind) throw new Error(`nobody defines ${resource.apiVersion}`);
    new Kind(resource).validate();
    console.log(`ok   ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL ${name}: ${error.message}`);
  }
}
process.exit(failed ? 1 : 0);
