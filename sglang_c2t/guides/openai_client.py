"""Reads speculation metrics with the `openai` package: from an answer, a stream and a tool call.

    python openai_client.py http://127.0.0.1:30000

Servers need `--tool-call-parser` for tools. `extra_body` holds fields of SGLang that OpenAI's
protocol lacks: `return_spec_tokens_details` adds the verified drafts to an answer.
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


def spec_details(answer: Any) -> dict[str, Any]:
    """Return the metrics of an answer or of a stream's last piece; empty if it was not verified."""
    extension = (answer.model_extra or {}).get("sglext") or {}
    details: dict[str, Any] = extension.get("spec_tokens_details") or {}
    return details


def sentence(details: dict[str, Any]) -> str:
    """Format the most important metrics."""
    if not details:
        return "nothing was verified"
    return (
        f"{details['spec_verify_ct']} verifications of "
        f"{details['spec_num_proposed_drafts']} drafts, {details['spec_num_correct_drafts']} "
        f"of them right: {details['spec_accept_length']:.2f} tokens per verification"
    )


def main(url: str) -> None:
    """Send three requests and print the metrics of each."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked: Any = {
        "model": model, "messages": [{"role": "user", "content": ASKED}], "temperature": 0,
        "max_tokens": 64, "extra_body": TELL,
    }  # fmt: skip

    answer = client.chat.completions.create(**asked)
    print(f"answer: {json.dumps(answer.choices[0].message.content)}")
    print(f"  {sentence(spec_details(answer))}")

    text = ""
    details: dict[str, Any] = {}
    for piece in client.chat.completions.create(**asked, stream=True):
        details = spec_details(piece) or details
        text += "".join(choice.delta.content or "" for choice in piece.choices)
    print(f"stream: {json.dumps(text)}")
    print(f"  {sentence(details)}")

    answer = client.chat.completions.create(**asked, tools=[WEATHER], tool_choice="required")
    for call in answer.choices[0].message.tool_calls or []:
        print(f"tool: {call.function.name} {call.function.arguments}")
    print(f"  {sentence(spec_details(answer))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
