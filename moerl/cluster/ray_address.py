"""Where the nodes of a Ray cluster reach each other."""

import ray


def reached_at() -> str | None:
    """This node's address for the other nodes of the cluster; None when it is the only one. Ray must be initialised."""
    alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return ray.util.get_node_ip_address() if len(alive) > 1 else None
