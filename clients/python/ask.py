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


def whole_number(high):
    def parse(text):
        value = int(text)
        if not 0 <= value <= high:
            raise argparse.ArgumentTypeError(f"expected 0 to {high}, found {text}")
        return value
    parse.__name__ = "whole number"  # for argparse's message
    return parse


def number(low, high):
    def parse(text):
        value = float(text)
        if not low <= value <= high:  # nan is not
            raise argparse.ArgumentTypeError(f"expected {low:g} to {high:g}, found {text}")
        return value
    parse.__name__ = "number"
    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description="Ask a weir-server one question.")
    parser.add_argument("prompt")
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--temperature", type=number(-3e38, 3e38))  # the server says what it takes
    parser.add_argument("--seed", type=whole_number(2**64 - 1))
    parser.add_argument("--max-tokens", type=whole_number(2**32 - 1))
    parser.add_argument("--stop", action="append", default=[], help="may be given several times")
    parser.add_argument("--timeout", type=number(0.001, 1e8), default=60, metavar="SECONDS")
    arguments = parser.parse_args()
    for text in [arguments.prompt, *arguments.stop]:
        try:
            text.encode()
        except UnicodeEncodeError:  # what the shell gave was not UTF-8
            parser.error(f"expected text in UTF-8, found {text!r}")
    return arguments


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
