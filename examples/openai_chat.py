"""Ask a running server through the official `openai` client: a completion, a chat answer, a streamed chat answer.

    python examples/openai_chat.py "What is a draft?"

TREEWY_URL names the server (default http://127.0.0.1:30000, as `make serve` leaves it).
"""

import argparse
import os

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="What is a draft?")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    # The server checks no key unless it was started with --api-key, but the client wants one.
    url = os.environ.get("TREEWY_URL", "http://127.0.0.1:30000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    asked = dict(model=model, max_tokens=args.max_tokens, temperature=0)
    messages = [{"role": "user", "content": args.prompt}]

    completion = client.completions.create(prompt=args.prompt, **asked)
    print(f"completion ({completion.usage.completion_tokens} tokens): {completion.choices[0].text}")

    answer = client.chat.completions.create(messages=messages, **asked)
    print(f"chat ({answer.usage.completion_tokens} tokens): {answer.choices[0].message.content}")

    print("streamed: ", end="", flush=True)
    stream = client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **asked)
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            print(event.choices[0].delta.content, end="", flush=True)
        if event.usage:  # the last event
            print(f"\nstreamed tokens: {event.usage.completion_tokens}")


if __name__ == "__main__":
    main()
