"""A Ray cluster of two nodes on this machine, in a process of its own: `address`, then commands on stdin.

`kill` kills the second node's raylet, `add` brings another node, the end of stdin ends all.
"""

import os
import sys
from typing import Any

# By default workers are niced, and on a busy machine others leave them nothing.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")

from ray.cluster_utils import Cluster


def main() -> None:
    """Every node has one core and so takes one rank."""
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    second = cluster.add_node(**node)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
        else:
            second = cluster.add_node(**node)
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
