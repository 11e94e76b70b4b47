// openai-node against a gateway (or an engine): what its users see.
//
// Environment: GOODPUT_URL, GOODPUT_KEY, GOODPUT_MODEL, and GOODPUT_NODE_MODULES, the folder
// that holds the `openai` package (without it: the usual places).

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";

const modules = process.env.GOODPUT_NODE_MODULES;
const require = createRequire(modules ? path.join(modules, "..", "here.js") : import.meta.url);
const { default: OpenAI } = require("openai");

const url = process.env.GOODPUT_URL.replace(/\/$/, "");
const model = process.env.GOODPUT_MODEL ?? "sim";
const client = new OpenAI({
  baseURL: `${url}/v1`,
  apiKey: process.env.GOODPUT_KEY ?? "none",
  maxRetries: 0,
  timeout: 60_000,
});
const messages = [{ role: "user", content: "the gateway streams tokens" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Bern"] } },
  required: ["city"],
};
const tools = [{ type: "function", function: { name: "lookup", parameters } }];

const steps = {
  async "a whole chat answer has text and usage"() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 12 });
    assert.ok(answer.choices[0].message.content);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },

  async "a stream without usage has choices in every event"() {
    let text = "";
    let reason = null;
    for await (const event of await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true })) {
      text += event.choices[0].delta.content ?? "";
      reason = event.choices[0].finish_reason ?? reason;
    }
    assert.ok(text);
    assert.ok(["stop", "length"].includes(reason));
  },

  async "the runner accumulates a stream"() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 8 });
    const final = await stream.finalChatCompletion();
    assert.ok(final.choices[0].message.content);
  },

  async "a demanded tool call accumulates"() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 120, tools, tool_choice: "required" });
    const final = await stream.finalChatCompletion();
    const call = final.choices[0].message.tool_calls[0];
    assert.equal(call.function.name, "lookup");
    assert.ok(JSON.parse(call.function.arguments).city);
  },

  async "completions stream"() {
    let text = "";
    const stream = await client.completions.create({ model, prompt: "the gateway", max_tokens: 6, stream: true });
    for await (const event of stream) text += event.choices[0].text;
    assert.ok(text);
  },

  async "responses whole and streamed"() {
    const ask = { model, input: "the gateway streams", max_output_tokens: 16 };
    assert.ok((await client.responses.create(ask)).output_text);
    const kinds = [];
    for await (const event of await client.responses.create({ ...ask, stream: true })) kinds.push(event.type);
    assert.equal(kinds[0], "response.created");
    assert.ok(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
  },

  async "embeddings are decoded from base64"() {
    const answer = await client.embeddings.create({ model, input: "one" });
    assert.ok(answer.data[0].embedding.length > 1);
    assert.ok(answer.data[0].embedding.every(Number.isFinite));
  },

  async "an unknown model is not found"() {
    const ask = client.chat.completions.create({ model: "no-such-model", messages });
    await assert.rejects(ask, (error) => error instanceof OpenAI.NotFoundError && Boolean(error.error?.message));
  },

  async "an invalid request is a bad request"() {
    const ask = client.chat.completions.create({ model, messages, max_tokens: 0, stream: true });
    await assert.rejects(ask, OpenAI.BadRequestError);
  },

  async "a stream may be left and the next request served"() {
    const long = { model, messages, max_tokens: 400, stream: true, ignore_eos: true };
    for (let round = 0; round < 5; round += 1) {
      const stream = await client.chat.completions.create(long);
      let seen = 0;
      for await (const _ of stream) if (++seen === 3) break;
      stream.controller.abort();
    }
    assert.ok((await client.chat.completions.create({ model, messages, max_tokens: 2 })).choices);
  },
};

let failed = 0;
for (const [name, act] of Object.entries(steps)) {
  try {
    await act();
    console.log(`ok   ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL ${name}`);
    console.error(error);
  }
}
console.log(`${Object.keys(steps).length - failed} of ${Object.keys(steps).length} steps held`);
process.exitCode = failed ? 1 : 0;
