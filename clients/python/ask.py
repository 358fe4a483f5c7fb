#!/usr/bin/env python3
"""Asks a weir-server one question and prints the answer as it arrives.

    ./generate.sh                      # once: writes weir/v1/generation_pb2*.py beside this file
    ./ask.py "In the beginning" --max-tokens 64
"""
import argparse
import sys

import grpc

try:
    from weir.v1 import generation_pb2 as pb
    from weir.v1 import generation_pb2_grpc as rpc
except ImportError as error:
    sys.exit(f"ask.py: {error}; run generate.sh first, or set PYTHONPATH to its output")


def parse_arguments():
    parser = argparse.ArgumentParser(description="Ask a weir-server one question.")
    parser.add_argument("prompt")
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--stop", action="append", default=[], help="may be given several times")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS")
    return parser.parse_args()


def make_request(arguments):
    # A field that is left out takes the server's default.
    return pb.GenerateRequest(
        prompt=arguments.prompt,
        sampling=pb.SamplingParameters(temperature=arguments.temperature, seed=arguments.seed),
        stop=pb.StopParameters(strings=arguments.stop, max_tokens=arguments.max_tokens),
    )


def main():
    arguments = parse_arguments()
    with grpc.insecure_channel(arguments.server) as channel:
        stub = rpc.GenerationStub(channel)
        for response in stub.Generate(make_request(arguments), timeout=arguments.timeout):
            print(response.text, end="", flush=True)
            if response.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                reason = pb.FinishReason.Name(response.finish_reason)
                tokens = response.usage.generated_tokens
                print(f"\n[{reason}, {tokens} tokens]", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(f"ask.py: {error.code().name}: {error.details()}")
    except KeyboardInterrupt:
        sys.exit(130)
