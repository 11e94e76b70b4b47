"""openai-python against a gateway (or an engine): what its users see.

Environment: GOODPUT_URL, GOODPUT_KEY, GOODPUT_MODEL, and GOODPUT_WITHOUT, what the engine lacks: any of
embeddings, model_check, sequence_numbers, strictness, tools.
"""

import openai

from steps import KEY, MODEL, SAY, URL, raises, run_all, step, step_with

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
MESSAGES = [{"role": "user", "content": SAY}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "look up a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Oslo", "Bern"]},
                    "days": {"type": "integer", "enum": [1, 2]},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


@step
def models_are_listed():
    """/v1/models names the model."""
    assert MODEL in [model.id for model in client.models.list()]


@step
def chat_whole():
    """A non-streaming chat answer has text, a reason and usage that adds up."""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@step
def chat_stream_without_usage_shows_none():
    """A stream that did not ask for usage has no usage and no event without choices."""
    events = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, stream=True))
    assert all(event.choices for event in events), "an event without choices breaks choices[0]"
    assert all(event.usage is None for event in events)
    assert "".join(event.choices[0].delta.content or "" for event in events)
    assert events[-1].choices[0].finish_reason in ("stop", "length")
    assert [event.choices[0].delta.role for event in events].count("assistant") == 1


@step
def chat_stream_with_usage_ends_in_it():
    """A stream that asked for usage has exactly one usage event, the last."""
    options = {"include_usage": True}
    events = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, stream=True, stream_options=options
        )
    )
    assert [bool(event.usage) for event in events].count(True) == 1
    assert events[-1].usage.completion_tokens > 0
    assert events[-1].choices == []


@step
def chat_stream_with_two_choices():
    """n = 2 gives two choices, each with text and a reason."""
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, stream=True, n=2)
    texts, reasons = {}, {}
    for event in stream:
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert sorted(texts) == sorted(reasons) == [0, 1]
    assert all(texts.values())


@step_with("tools")
def chat_tool_call_whole():
    """A demanded tool is called with the arguments that its schema allows."""
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=120, tools=TOOLS, tool_choice="required"
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "lookup"
    assert '"city"' in call.function.arguments
    assert answer.choices[0].finish_reason == "tool_calls"


@step_with("tools")
def chat_tool_call_stream_accumulates():
    """The SDK's own accumulation of a streamed tool call gives one whole call."""
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, max_tokens=120, tools=TOOLS, tool_choice="required"
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert call.function.name == "lookup"
    assert call.function.arguments.endswith("}")


@step
def completions_whole_and_stream_say_the_same():
    """`completions` gives the same text whole and streamed at temperature 0."""
    ask = dict(model=MODEL, prompt=SAY, max_tokens=8, temperature=0)
    whole = client.completions.create(**ask)
    streamed = "".join(event.choices[0].text for event in client.completions.create(**ask, stream=True))
    assert whole.choices[0].text == streamed
    assert whole.usage.completion_tokens > 0


@step
def responses_whole():
    """A non-streaming response has output text and usage."""
    response = client.responses.create(model=MODEL, input=SAY, max_output_tokens=16)
    assert response.output_text
    assert 0 < response.usage.output_tokens <= 16


@step
def responses_stream_ends_in_completed():
    """A streamed response starts with `created`, has deltas, and ends in `completed`."""
    events = list(client.responses.create(model=MODEL, input=SAY, max_output_tokens=16, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text and text == events[-1].response.output_text


@step_with("sequence_numbers")
def responses_stream_is_numbered():
    """The events of a streamed response carry numbers that rise."""
    events = client.responses.create(model=MODEL, input=SAY, max_output_tokens=16, stream=True)
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))


@step_with("embeddings")
def embeddings():
    """Embeddings come back as vectors, one per input."""
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert len(answer.data) == 2 and len(answer.data[0].embedding) > 1
    assert all(isinstance(value, float) for value in answer.data[0].embedding)


@step_with("model_check")
def an_unknown_model_is_not_found():
    """An unknown model raises NotFoundError with an error object."""
    ask = lambda: client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    error = raises(openai.NotFoundError, ask)
    assert error.status_code == 404 and error.body and error.body["message"]


@step_with("strictness")
def an_invalid_request_is_a_bad_request():
    """An invalid value raises BadRequestError, streaming or not."""
    for stream in (False, True):
        ask = lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=0, stream=stream)
        assert raises(openai.BadRequestError, ask).status_code == 400


@step
def a_stream_may_be_left_and_the_next_request_served():
    """Closing a stream in its middle leaves the client and the service usable."""
    for _ in range(5):
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        for number, _ in enumerate(stream):
            if number == 3:
                break
        stream.close()
    assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2).choices


@step
def the_request_id_comes_back():
    """The client's x-request-id is on the response, where the service sends one."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, extra_headers={"x-request-id": "e2e-42"}
    )
    assert raw.headers.get("x-request-id", "e2e-42") == "e2e-42"


run_all()
