"""Whether NCCL on this node could have its sums made in InfiniBand switches (SHARP): a network plugin with CollNet that can be loaded.

NCCL looks for it as the loader does (src/plugin/plugin_open.cc), and takes one without CollNet too; where no connection to the switches is
made, all ranks go without (src/transport.cc, "Cannot initialize CollNet"). Whether the fabric has an aggregation manager, and flows to
spare, of which a switch has few, is not seen on a node.
"""

import re
import sys
from collections.abc import Mapping

from moerl.hardware.hardware_tools import Absent, run_tool

_LOAD = """
import ctypes, sys
said = []
for name in sys.argv[1:]:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        said.append(str(error))
        continue
    print("loaded", name, *[version for version in range(12, 5, -1) if hasattr(library, f"ncclCollNetPlugin_v{version}")])
    break
else:
    print("failed", *said, sep="; ")
"""


def find_sharp(environment: Mapping[str, str]) -> str | Absent:
    """The plugin and its version of CollNet, for people. `environment`: of a process that will load NCCL."""
    asked = environment.get("NCCL_NET_PLUGIN", "")
    names = [name for each in asked.split(",") if each for name in (each, f"libnccl-net-{each}.so")] if asked else ["libnccl-net.so"]
    said = run_tool(sys.executable, "-S", "-c", _LOAD, *names)
    if isinstance(said, Absent):
        return Absent(reason=f"NCCL's network plugin cannot be loaded: {said.reason}")
    loaded = re.match(r"loaded (\S+) ?(\d+)?", said)
    if loaded is None:
        return Absent(reason=f"no network plugin for NCCL: {said.removeprefix('failed; ').strip()}")
    if loaded[2] is None:
        return Absent(reason=f"{loaded[1]} has no CollNet, which SHARP comes by")
    return f"{loaded[1]} with CollNet v{loaded[2]}"
