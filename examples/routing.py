"""What sending requests to the replica that has their documents saves, on made-up requests with popular documents.

Each replica has room for a share of all documents' KV in memory and computes one request after the other. Times are in
units of one token's computing; what a replica does not have is computed, as without a tier that machines share.
"""

import argparse

from kvboost_rag.replay import ROUTINGS, TraceOptions, make_trace, replay_routing

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--requests", type=int, default=1000, help="(default 1000)")
parser.add_argument("--documents", type=int, default=300, help="(default 300)")
parser.add_argument("--replicas", type=int, default=4, help="(default 4)")
parser.add_argument("--room", type=float, default=0.1, help="of a replica, as a share of all KV (default 0.1)")
parser.add_argument("--use", type=float, default=0.7, help="how busy half of the tokens would keep all (default 0.7)")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

print(f"{args.requests} requests to {args.replicas} replicas, each with room for {args.room:.0%} of all documents' KV")
print(f"{'documents a prompt':<19} {'routing':<20} {'hit rate':>8} {'first token, median':>20} {'95 %':>8} busiest")
for used in (1, 4):
    trace = make_trace(
        TraceOptions(requests=args.requests, documents=args.documents, seed=args.seed, retrieved=2 * used, used=used)
    )
    for routing in ROUTINGS:
        r = replay_routing(
            trace, routing, replicas=args.replicas, budget_share=args.room, use=args.use, seed=args.seed
        )
        numbers = f"{r.hit_rate:>8.1%} {r.median:>20.0f} {r.slow:>8.0f} {r.busiest:>8.2f}"
        print(f"{used:<19} {routing:<20} {numbers}", flush=True)
