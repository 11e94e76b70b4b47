"""Reads a dashboard by Grafana's own schema, writes it again, and says what got lost on the way.

Usage: dashboard_schema.py FILE
"""

import json
import sys

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard, RowPanel

OPTIONS = {"timeseries": timeseries.Options, "stat": stat.Options, "heatmap": heatmap.Options}


def lost(ours, theirs, path="$"):
    """Every place of ours that is not in theirs, or has another value there."""
    if isinstance(ours, dict):
        if not isinstance(theirs, dict):
            return [path]
        gone = []
        for key, value in ours.items():
            # What is null may be left out.
            if key not in theirs:
                gone += [] if value is None else [f"{path}.{key}"]
            else:
                gone += lost(value, theirs[key], f"{path}.{key}")
        return gone
    if isinstance(ours, list):
        if not isinstance(theirs, list) or len(ours) != len(theirs):
            return [path]
        return [place for at, (a, b) in enumerate(zip(ours, theirs)) for place in lost(a, b, f"{path}[{at}]")]
    return [] if ours == theirs else [f"{path}: {ours!r} is {theirs!r}"]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        ours = json.load(file)
    plugins.register_default_plugins()
    board = Dashboard.from_json(ours)
    panels = [panel for panel in board.panels if not isinstance(panel, RowPanel)]
    assert len(panels) > 40, len(panels)
    for panel in panels:
        kind = OPTIONS[panel.type_val]
        assert isinstance(panel.options, kind), f"{panel.title}: its options were not read as {kind}"
        assert panel.targets, panel.title
        for target in panel.targets:
            assert isinstance(target, prometheus.Dataquery), f"{panel.title}: {type(target)}"
            assert target.expr and target.ref_id, panel.title
    theirs = json.loads(JSONEncoder(sort_keys=True).encode(board))
    gone = lost(ours, theirs)
    assert not gone, "\n".join(gone)
    print(f"{len(panels)} panels are as Grafana writes them")


main()
