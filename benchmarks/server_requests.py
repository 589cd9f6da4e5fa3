"""CPU that a server's table of requests costs, by the number of requests in flight: who begins or ends must cost the same among many.

    python benchmarks/server_requests.py --requests 256 2048 8192 --running 256 --rounds 3

The real state of a server around an engine that answers at once, in turns; the least of the rounds, and its ratio to the first number's.
"""

import argparse
import asyncio
import time

from moerl.rollout.server.contract import Core
from moerl.rollout.server.server_state import ServerState
from moerl.types.completion import Completion, SamplingParams, ServerLoad


class InstantCore(Core):
    async def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Completion:
        await asyncio.sleep(0)
        return Completion(request_id=key, token_ids=(1,), logprobs=(-1.0,), spans=(), finish_reason="stop")

    def load(self) -> ServerLoad:
        return ServerLoad()


async def cpu_of(num_requests: int, max_running: int) -> float:
    """Seconds of CPU for each of the requests, which are all there at once."""
    state = ServerState(InstantCore(), max_running=max_running, version=1)  # type: ignore[abstract]
    began = time.process_time()
    await asyncio.gather(*(state.generate((1, 2), SamplingParams(max_tokens=1, seed=i), f"request-{i}") for i in range(num_requests)))
    return (time.process_time() - began) / num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 2048, 8192])
    parser.add_argument("--running", type=int, default=256, help="that the engine has at most")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[int, list[float]] = {number: [] for number in options.requests}
    for _ in range(options.rounds):
        for number in options.requests:
            found[number].append(asyncio.run(cpu_of(number, options.running)))
    first = min(found[options.requests[0]])
    print("| requests in flight | microseconds of each | ratio |")
    print("| --- | --- | --- |")
    for number, seconds in found.items():
        print(f"| {number} | {1e6 * min(seconds):.0f} | {min(seconds) / first:.2f} |")


if __name__ == "__main__":
    main()
