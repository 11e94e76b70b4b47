"""A server whose answers are known beforehand, for load generators to be held against.

    judged_server.py PORT

Streams answers to /v1/chat/completions and /v1/completions. The kind of an answer follows from the number of the request
since the last `POST /reset/PATTERN`:

- `plain`: of eight requests six are good, one has a slow first token, one has slow tokens;
- `mixed`: of twelve six are good, and one each has a slow first token, slow tokens, one token only, a 503, an error inside a
  200, and a connection that is cut in the middle;
- each of the last four by its name: nothing else.

`GET /served` tells how many of each kind were sent. Requests without a stream are answered at once and not counted.
"""

import asyncio
import collections
import json
import sys

FIRST, SLOW_FIRST = 0.03, 0.6
GAP, SLOW_GAP = 0.01, 0.12
TOKENS = 10
PATTERNS = {
    "plain": ["good"] * 6 + ["slow_first", "slow_tokens"],
    "mixed": ["good"] * 6 + ["slow_first", "slow_tokens", "one_token", "status_503", "error_in_band", "cut"],
    **{kind: [kind] for kind in ("one_token", "status_503", "error_in_band", "cut")},
}


class Server:
    def __init__(self):
        self.pattern = PATTERNS["plain"]
        self.number = 0
        self.served = collections.Counter()

    def kind(self):
        kind = self.pattern[self.number % len(self.pattern)]
        self.number += 1
        self.served[kind] += 1
        return kind

    async def connection(self, reader, writer):
        try:
            while await self.exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def exchange(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path = head.split(" ", 2)[:2]
        fields = dict(line.split(":", 1) for line in head.lower().split("\r\n")[1:] if ":" in line)
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        if path.startswith("/reset/"):
            self.pattern, self.number = PATTERNS[path.rsplit("/", 1)[1]], 0
            self.served.clear()
            return await self.whole(writer, {"done": True})
        if path == "/served":
            return await self.whole(writer, dict(self.served))
        if path == "/v1/models":
            return await self.whole(writer, {"object": "list", "data": [{"id": "judged", "object": "model"}]})
        if method == "GET":
            return await self.whole(writer, {"status": "ok"})
        if not body:
            return await self.whole(writer, {"error": {"message": "no body"}}, "400 Bad Request")
        asked = json.loads(body)
        is_chat = "messages" in asked
        words = len(json.dumps(asked.get("messages", asked.get("prompt", ""))).split())
        usage = {"prompt_tokens": words, "completion_tokens": TOKENS, "total_tokens": words + TOKENS}
        if not asked.get("stream"):
            text = {"message": {"role": "assistant", "content": "word"}} if is_chat else {"text": "word"}
            choice = {"index": 0, "finish_reason": "stop", **text}
            return await self.whole(writer, {"id": "1", "model": "judged", "choices": [choice], "usage": usage})
        return await self.stream(writer, self.kind(), is_chat, usage)

    async def whole(self, writer, value, status="200 OK"):
        text = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        await writer.drain()
        return True

    async def stream(self, writer, kind, is_chat, usage):
        if kind == "status_503":
            return await self.whole(writer, {"error": {"message": "busy", "code": 503}}, "503 Service Unavailable")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

        async def event(value):
            text = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
            writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
            await writer.drain()

        def token(word, finish=None):
            part = {"delta": {"content": word} if word else {}} if is_chat else {"text": word}
            kind_of = "chat.completion.chunk" if is_chat else "text_completion"
            return {"id": "1", "object": kind_of, "model": "judged", "choices": [{"index": 0, "finish_reason": finish, **part}]}

        await asyncio.sleep(SLOW_FIRST if kind == "slow_first" else FIRST)
        tokens = 1 if kind == "one_token" else TOKENS
        for number in range(tokens):
            if number > 0:
                await asyncio.sleep(SLOW_GAP if kind == "slow_tokens" else GAP)
            if number == 5 and kind == "cut":
                writer.transport.abort()
                return False
            if number == 5 and kind == "error_in_band":
                await event({"error": {"message": "the engine died", "type": "server_error", "code": 500}})
                tokens = 0
                break
            await event(token("word ", "stop" if number + 1 == tokens else None))
        if tokens:
            usage = {**usage, "completion_tokens": tokens}
            await event({"id": "1", "object": "chat.completion.chunk", "model": "judged", "choices": [], "usage": usage})
            await event("[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def main():
    server = Server()
    listening = await asyncio.start_server(server.connection, "127.0.0.1", int(sys.argv[1]))
    print("listening", flush=True)
    await listening.serve_forever()


asyncio.run(main())
