"""anthropic-python against a gateway (or an engine): what its users see.

Environment: GOODPUT_URL, GOODPUT_KEY, GOODPUT_MODEL, and GOODPUT_WITHOUT, what the engine lacks: any of
model_check, strictness, tools.
"""

import anthropic

from steps import KEY, MODEL, SAY, URL, raises, run_all, step, step_with

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
MESSAGES = [{"role": "user", "content": SAY}]
TOOLS = [
    {
        "name": "lookup",
        "description": "look up a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Bern"]}},
            "required": ["city"],
        },
    }
]


@step
def message_whole():
    """A message has text, a stop reason and usage."""
    message = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    assert "".join(block.text for block in message.content if block.type == "text")
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens > 0 and 0 < message.usage.output_tokens <= 12


@step
def message_stream_accumulates():
    """The SDK's own accumulation of a stream gives the text that was streamed, and usage."""
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=12) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and text == final.content[-1].text
    assert final.stop_reason in ("end_turn", "max_tokens")
    assert 0 < final.usage.output_tokens <= 12


@step
def message_stream_events_are_in_order():
    """The raw events begin with message_start and end with message_stop."""
    kinds = [event.type for event in client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=6, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds[-2] == "message_delta"
    assert "content_block_delta" in kinds


@step_with("tools")
def a_demanded_tool_is_used():
    """`tool_choice: any` gives a tool_use block, whole and streamed."""
    ask = dict(model=MODEL, messages=MESSAGES, max_tokens=120, tools=TOOLS, tool_choice={"type": "any"})
    message = client.messages.create(**ask)
    used = [block for block in message.content if block.type == "tool_use"]
    assert used[0].name == "lookup" and used[0].input["city"] in ("Oslo", "Bern")
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    used = [block for block in final.content if block.type == "tool_use"]
    assert used[0].input["city"] in ("Oslo", "Bern")


@step
def tokens_are_counted():
    """count_tokens answers a number."""
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0


@step_with("model_check")
def an_unknown_model_is_not_found():
    """An unknown model raises NotFoundError with the dialect's error object."""
    error = raises(
        anthropic.NotFoundError,
        lambda: client.messages.create(model="no-such-model", messages=MESSAGES, max_tokens=4),
    )
    assert error.body["type"] == "error" and error.body["error"]["message"]


@step_with("strictness")
def an_invalid_request_is_a_bad_request():
    """An empty conversation raises BadRequestError."""
    ask = lambda: client.messages.create(model=MODEL, messages=[], max_tokens=4)
    assert raises(anthropic.BadRequestError, ask).body["type"] == "error"


@step
def a_stream_may_be_left_and_the_next_request_served():
    """Closing a stream in its middle leaves the client and the service usable."""
    for _ in range(5):
        with client.messages.stream(
            model=MODEL, messages=MESSAGES, max_tokens=400, extra_body={"ignore_eos": True}
        ) as stream:
            for _ in stream.text_stream:
                break
    assert client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=2).content is not None


run_all()
