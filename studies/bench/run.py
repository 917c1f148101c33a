"""``make bench``: run every benchmark and write ``studies/bench/results/*.json``."""

import argparse
import importlib
from pathlib import Path

HERE = Path(__file__).parent
# benchmark file -> result file
BENCHES = {
    "defense_scores": "defense.json",
    "attacks": "attacks.json",
    "whole_attacks": "whole-attacks.json",
    "federated": "federated.json",
    "certificates": "certificates.json",
    "guard": "guard.json",
    "veil": "veil.json",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHES), help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    for name in args.names:
        suffix = "" if args.device == "cpu" else f"-{args.device}"
        path = args.out / BENCHES[name].replace(".json", f"{suffix}.json")
        print(f"== {name} -> {path}", flush=True)
        importlib.import_module(name).main(["--device", args.device, "--out", str(path)])


if __name__ == "__main__":
    main()
