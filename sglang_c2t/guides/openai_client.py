"""What the `openai` package learns of speculation: an answer, a stream, and a call of a tool.

    python openai_client.py http://127.0.0.1:30000

Servers want `--tool-call-parser` for tools. What is asked for in `extra_body` is SGLang's own and
not in OpenAI's protocol: `return_spec_tokens_details` has an answer tell what was verified for it.
"""

import json
import sys
from typing import Any

import openai

ASKED = "Why is the sky blue?"
TELL = {"return_spec_tokens_details": True}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}


def told(answer: Any) -> dict[str, Any]:
    """What an answer, or the last piece of a stream, tells of its drafts; empty on servers that do
    not draft, and for answers too short for a verification.
    """
    beside = (answer.model_extra or {}).get("sglext") or {}
    details: dict[str, Any] = beside.get("spec_tokens_details") or {}
    return details


def sentence(details: dict[str, Any]) -> str:
    """The facts that one looks for first."""
    if not details:
        return "nothing was verified"
    return (
        f"{details['spec_verify_ct']} verifications of "
        f"{details['spec_num_proposed_drafts']} drafts, {details['spec_num_correct_drafts']} "
        f"of them right: {details['spec_accept_length']:.2f} tokens per verification"
    )


def main(url: str) -> None:
    """Three requests, and what is told of each."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked: Any = {
        "model": model, "messages": [{"role": "user", "content": ASKED}], "temperature": 0,
        "max_tokens": 64, "extra_body": TELL,
    }  # fmt: skip

    answer = client.chat.completions.create(**asked)
    print(f"answer: {json.dumps(answer.choices[0].message.content)}")
    print(f"  {sentence(told(answer))}")

    text = ""
    details: dict[str, Any] = {}
    for piece in client.chat.completions.create(**asked, stream=True):
        details = told(piece) or details
        text += "".join(choice.delta.content or "" for choice in piece.choices)
    print(f"stream: {json.dumps(text)}")
    print(f"  {sentence(details)}")

    answer = client.chat.completions.create(**asked, tools=[WEATHER], tool_choice="required")
    for call in answer.choices[0].message.tool_calls or []:
        print(f"tool: {call.function.name} {call.function.arguments}")
    print(f"  {sentence(told(answer))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
