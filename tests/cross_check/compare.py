"""Runs goodput and three other load generators against the judged server, and prints a table of what each of them counts.

    compare.py --goodput target/release/goodput --port 21090 --tools FOLDER

FOLDER holds one virtual environment for each tool, with the tool installed from PyPI: `guidellm`, `inference-perf`,
`aiperf` (`python3 -m venv FOLDER/aiperf && FOLDER/aiperf/bin/pip install aiperf`). One that is missing is told of and left
out. Requests are sent at 10 per second; TTFT 0.3 s and TPOT 0.05 s are promised.
"""

import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
TTFT, TPOT, RATE = 0.3, 0.05, 10
SIZES = {"plain": 80, "one_token": 20, "status_503": 20, "error_in_band": 20, "cut": 20, "mixed": 120}


def ask(port, path, method="GET"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    return json.load(urllib.request.urlopen(request))


def run(command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=420, **more)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-1500:]}")
    return done.stdout


def make_tokenizer(python, folder):
    """A tokenizer of one token a word, so that no tool has to fetch one."""
    code = f"""
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = ["[UNK]", "</s>", "<s>"] + ["word"] + [f"w{{number}}" for number in range(500)]
made = Tokenizer(models.WordLevel({{word: at for at, word in enumerate(words)}}, unk_token="[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="</s>", bos_token="<s>").save_pretrained({folder!r})
"""
    run([python, "-c", code])


def with_goodput(options, folder, count):
    trace = os.path.join(folder, "trace.csv")
    with open(trace, "w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for number in range(count):
            file.write(f"2024-05-10 00:00:{number / RATE:010.7f},20,10\n")
    line = [options.goodput, "replay", trace, "--url", f"http://127.0.0.1:{options.port}", "--json"]
    said = run(line + ["--ttft", str(TTFT), "--tpot", str(TPOT), "--target", "0.9"])
    result = json.loads(said[said.index("{"):])
    only = result["classes"][0]
    told = ", ".join(f"{reason} {count}" for reason, count in only["missed"].items())
    return only["met"], only["met"] + sum(only["missed"].values()), told


def with_aiperf(options, folder, count):
    tool = os.path.join(options.tools, "aiperf", "bin", "aiperf")
    out = os.path.join(folder, "aiperf")
    run(
        [
            tool, "profile", "--model", "judged", "--url", f"http://127.0.0.1:{options.port}", "--endpoint-type", "chat",
            "--streaming", "--request-rate", str(RATE), "--arrival-pattern", "constant", "--request-count", str(count),
            "--tokenizer", folder, "--synthetic-input-tokens-mean", "20", "--synthetic-input-tokens-stddev", "0",
            "--output-tokens-mean", "10", "--artifact-dir", out, "--ui", "none",
            "--goodput", f"time_to_first_token:{TTFT * 1e3:.0f} inter_token_latency:{TPOT * 1e3:.0f}",
        ]
    )
    summary = json.load(open(glob.glob(os.path.join(out, "**", "profile_export_aiperf.json"), recursive=True)[0]))
    value = lambda name: (summary.get(name) or {}).get("avg")
    good, done, failed = value("good_request_count"), value("request_count"), value("error_request_count")
    return round(good or 0), round(done or 0), f"{round(failed or 0)} errors beside them"


def with_inference_perf(options, folder, count):
    tool = os.path.join(options.tools, "inference-perf", "bin", "inference-perf")
    out, config = os.path.join(folder, "inference-perf"), os.path.join(folder, "inference-perf.yaml")
    settings = {
        "api": {"type": "completion", "streaming": True},
        "data": {
            "type": "random",
            "input_distribution": {"min": 20, "max": 20, "mean": 20, "std_dev": 0, "total_count": count},
            "output_distribution": {"min": 10, "max": 10, "mean": 10, "std_dev": 0, "total_count": count},
        },
        "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": RATE, "duration": count // RATE}]},
        "server": {"type": "vllm", "model_name": "judged", "base_url": f"http://127.0.0.1:{options.port}"},
        "tokenizer": {"pretrained_model_name_or_path": folder},
        "report": {"goodput": {"constraints": {"ttft": TTFT, "tpot": TPOT}}},
        "storage": {"local_storage": {"path": out}},
    }
    json.dump(settings, open(config, "w"))
    said = run([tool, "-c", config])
    if not os.path.isdir(out):
        raise RuntimeError(said[-600:])
    report = json.load(open(glob.glob(os.path.join(out, "**", "summary_lifecycle_metrics.json"), recursive=True)[0]))
    successes, failures = report["successes"], report["failures"]
    found = successes.get("goodput_metrics") or {}
    return found.get("good_requests"), found.get("total_requests"), f"{failures.get('count')} failures beside them"


def with_guidellm(options, folder, count):
    tool = os.path.join(options.tools, "guidellm", "bin", "guidellm")
    out = os.path.join(folder, "guidellm.json")
    run(
        [
            tool, "run", "--backend", f"kind=openai_http,target=http://127.0.0.1:{options.port},model=judged", "--profile",
            f"kind=constant,rate={RATE}", "--constraint", f"kind=max_requests,count={count}", "--tokenizer",
            f"kind=hf_auto,model={folder}", "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=10", "--output",
            f"kind=json,path={out}", "--disable-progress",
        ],
        cwd=folder,
    )
    requests = json.load(open(out))["benchmarks"][0]["requests"]
    done = requests["successful"] or []

    # It has no goodput of its own: its measures of each request are held against the same thresholds.
    def is_good(one):
        tpot = one.get("inter_token_latency_ms")
        return one["time_to_first_token_ms"] <= TTFT * 1e3 and (tpot is None or tpot <= TPOT * 1e3)

    lost = len(requests["errored"] or []) + len(requests["incomplete"] or [])
    return sum(map(is_good, done)), len(done), f"{lost} errored or incomplete beside them"


TOOLS = {
    "goodput": with_goodput,
    "aiperf": with_aiperf,
    "inference-perf": with_inference_perf,
    "guidellm": with_guidellm,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--goodput", required=True)
    parser.add_argument("--tools", required=True)
    parser.add_argument("--port", type=int, default=21090)
    parser.add_argument("--only", nargs="*", default=list(TOOLS))
    options = parser.parse_args()
    options.tools = os.path.abspath(options.tools)
    server = subprocess.Popen([sys.executable, os.path.join(HERE, "judged_server.py"), str(options.port)], stdout=subprocess.PIPE)
    server.stdout.readline()
    print("| answers | tool | met | counted | share | beside |\n| --- | --- | --- | --- | --- | --- |")
    try:
        for pattern, count in SIZES.items():
            for name in options.only:
                if name != "goodput" and not os.path.exists(os.path.join(options.tools, name, "bin", name)):
                    print(f"| {pattern} | {name} | not installed | | | |", flush=True)
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    if name != "goodput":
                        make_tokenizer(os.path.join(options.tools, name, "bin", "python"), folder)
                    ask(options.port, f"/reset/{pattern}", "POST")
                    try:
                        met, counted, beside = TOOLS[name](options, folder, count)
                        share = f"{100 * met / counted:.2f} %" if counted and met is not None else ""
                    except Exception as error:  # A tool that fails is part of the result.
                        met, counted, share, beside = "", "", "", f"failed: {str(error)[-400:]!r}"
                    served = ask(options.port, "/served")
                    sent = sum(served.values())
                    print(f"| {pattern} | {name} | {met} | {counted} | {share} | {beside}; {sent} sent |", flush=True)
    finally:
        server.kill()


main()
