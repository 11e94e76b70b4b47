"""A real llama.cpp server with a tiny model made on the spot: real wire, nonsense text.

    llamacpp_engine.py [--port 0] [--context 2048] [--slots 4] [--model PATH]

Writes a two-layer llama with random weights (about 1 MB) as GGUF, serves it with the server
inside the `xllamacpp` package, prints `listening on http://HOST:PORT`, and runs until its
standard input ends or it is told to end.
"""

import argparse
import os
import signal
import sys
import tempfile

import numpy
from gguf import GGUFWriter, TokenType

EMBEDDING, LAYERS, HEADS, FORWARD = 64, 2, 4, 128
WORDS = [" the", " gateway", " streams", " tokens", " and", " every", " answer", " keeps", " its", " promise"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def vocabulary():
    """Token texts, scores and types: three special ones, every byte, a few words."""
    special = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    tokens = [(text, 0.0, kind) for text, kind in special]
    tokens += [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    tokens += [(chr(code), -10.0, TokenType.NORMAL) for code in range(33, 127)]
    tokens += [(word.replace(" ", "\u2581"), -1.0, TokenType.NORMAL) for word in WORDS]
    tokens += [("\u2581", -5.0, TokenType.NORMAL)]
    return tokens


def write_model(path, context):
    """Writes the model file."""
    tokens = vocabulary()
    chance = numpy.random.default_rng(7)
    out = GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_context_length(context)
    out.add_embedding_length(EMBEDDING)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(FORWARD)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_rope_dimension_count(EMBEDDING // HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("llama")
    out.add_token_list([text for text, _, _ in tokens])
    out.add_token_scores([score for _, score, _ in tokens])
    out.add_token_types([int(kind) for _, _, kind in tokens])
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(TEMPLATE)

    def weights(*shape):
        return (chance.standard_normal(shape) * 0.2).astype(numpy.float32)

    ones = numpy.ones(EMBEDDING, dtype=numpy.float32)
    out.add_tensor("token_embd.weight", weights(len(tokens), EMBEDDING))
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        out.add_tensor(name + "attn_norm.weight", ones)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            out.add_tensor(f"{name}{part}.weight", weights(EMBEDDING, EMBEDDING))
        out.add_tensor(name + "ffn_norm.weight", ones)
        out.add_tensor(name + "ffn_gate.weight", weights(FORWARD, EMBEDDING))
        out.add_tensor(name + "ffn_up.weight", weights(FORWARD, EMBEDDING))
        out.add_tensor(name + "ffn_down.weight", weights(EMBEDDING, FORWARD))
    out.add_tensor("output_norm.weight", ones)
    out.add_tensor("output.weight", weights(len(tokens), EMBEDDING))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def serve(path, arguments):
    """Starts the server, says where it listens, and waits for the end."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = {"tiny"}
    params.hostnames = ["127.0.0.1"]
    params.port = arguments.port
    params.n_ctx = arguments.context * arguments.slots
    params.n_parallel = arguments.slots
    params.n_gpu_layers = 0
    params.warmup = False
    # The same answer each time. Where chance makes half a character of the first token, the
    # server leaves out the event that begins its stream, which no client understands.
    params.sampling.temp = 0.0
    params.sampling.seed = 1
    params.endpoint_metrics = True
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    # Its threads do the work; the parent ends us by closing our input or by a signal.
    sys.stdin.read()
    return server


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--model", help="where to keep the model file; by default it is temporary")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or os.path.join(folder, "tiny.gguf")
        write_model(path, arguments.context)
        server = serve(path, arguments)
        del server


main()
