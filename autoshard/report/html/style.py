"""How the HTML report looks: light and dark, on wide and narrow screens, alone and in notebooks."""

from __future__ import annotations

AXES = 6  # mesh axes that have a colour of their own; further ones begin anew

_LIGHT = """
  --ink: #1c2733; --soft: #5b6875; --faint: #e3e8ed; --paper: #ffffff; --card: #f5f7f9; --bar: #c9d3dd;
  --good: #1d7f4c; --bad: #c03a2b; --compute: #5b7fb9; --talk: #e39a3b; --limit: #c03a2b;
  --axis0: #1f6fd0; --axis1: #c2570c; --axis2: #1d8348; --axis3: #7d3fc4; --axis4: #b0296f; --axis5: #0b7d86;
"""
_DARK = """
  --ink: #e4eaf0; --soft: #9aa8b5; --faint: #303a44; --paper: #14191f; --card: #1d242c; --bar: #465360;
  --good: #55c48a; --bad: #ff8577; --compute: #7ea3dd; --talk: #f0b25f; --limit: #ff8577;
  --axis0: #6fb1ff; --axis1: #ff9d5c; --axis2: #62cf8f; --axis3: #bd93f5; --axis4: #f581b6; --axis5: #54ccd4;
"""

# Arguments in cool colours, values that the step makes in warm ones; both are read on light and on dark ground.
_COOL = ("#2f5d9b", "#4f86c6", "#7fadde", "#2c8c8c", "#5bb3ae", "#93d0c9", "#6b74b8", "#9aa1d6", "#8a97a5")
_WARM = ("#d9822b", "#e8b04f", "#c9573c", "#e58e76", "#9c6b30", "#c7b299")

STYLE = f"""
.autoshard {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ .autoshard {{ {_DARK} }} }}
[data-jp-theme-light="true"] .autoshard, body.vscode-light .autoshard {{ {_LIGHT} }}
[data-jp-theme-light="false"] .autoshard, body.vscode-dark .autoshard {{ {_DARK} }}
.autoshard {{ color: var(--ink); background: var(--paper); font: 14px/1.5 system-ui, sans-serif; padding: 20px;
  border-radius: 8px; max-width: 1180px; margin: 0 auto; text-align: left; box-sizing: border-box; }}
.autoshard h1 {{ font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; }}
.autoshard h2 {{ font-size: 15px; margin: 30px 0 10px; padding-bottom: 4px; border-bottom: 1px solid var(--faint); }}
.autoshard p {{ margin: 6px 0; overflow-wrap: anywhere; }}
.autoshard .soft, .autoshard th {{ color: var(--soft); }}
.autoshard .cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px;
  margin-top: 16px; }}
.autoshard .card {{ background: var(--card); border-radius: 8px; padding: 12px 14px; }}
.autoshard .card b {{ display: block; font-size: 20px; line-height: 1.3; }}
.autoshard .scroll {{ overflow-x: auto; }}
.autoshard table {{ border-collapse: collapse; width: 100%; margin: 0; font-size: 13px; }}
.autoshard th {{ font-weight: 500; text-align: left; padding: 3px 10px; white-space: nowrap; }}
.autoshard td {{ padding: 3px 10px; text-align: left; vertical-align: top; border-top: 1px solid var(--faint);
  white-space: nowrap; background: none; }}
.autoshard td.words {{ white-space: normal; min-width: 200px; overflow-wrap: anywhere; color: var(--soft); }}
.autoshard .number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.autoshard code, .autoshard .path {{ font: 12px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  background: none; color: inherit; }}
.autoshard .axis {{ border-radius: 4px; padding: 0 5px; margin: 0 1px; color: var(--paper); background: var(--soft);
  font: 11px/1.6 ui-monospace, Menlo, Consolas, monospace; display: inline-block; }}
{"".join(f".autoshard .axis{i} {{ background: var(--axis{i}); }}" for i in range(AXES))}
.autoshard .over {{ color: var(--bad); font-weight: 600; }}
.autoshard .warning {{ border-left: 3px solid var(--talk); padding: 4px 12px; margin: 10px 0;
  background: var(--card); }}
.autoshard .track {{ display: flex; height: 10px; border-radius: 5px; background: var(--faint); overflow: hidden;
  min-width: 120px; margin: 5px 0; }}
.autoshard .track span {{ display: block; height: 100%; }}
.autoshard .compute {{ background: var(--compute); }} .autoshard .talk {{ background: var(--talk); }}
.autoshard .swatch {{ display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }}
.autoshard .tree details {{ margin-left: 14px; }} .autoshard .tree > details {{ margin-left: 0; }}
.autoshard .tree summary, .autoshard .leaf {{ display: flex; gap: 4px 12px; align-items: baseline; flex-wrap: wrap;
  padding: 1px 6px; border-radius: 4px; }}
.autoshard .tree summary {{ cursor: pointer; }}
.autoshard .tree summary::before {{ content: "\\25B8"; color: var(--soft); width: 10px; }}
.autoshard .tree details[open] > summary::before {{ content: "\\25BE"; }}
.autoshard .tree summary:hover, .autoshard .leaf:hover {{ background: var(--card); }}
.autoshard .leaf {{ margin-left: 36px; }} .autoshard .tree .size {{ margin-left: auto; white-space: nowrap; }}
.autoshard svg {{ display: block; width: 100%; height: auto; }}
.autoshard svg text {{ fill: var(--soft); font: 11px system-ui, sans-serif; }}
.autoshard svg .limit {{ stroke: var(--limit); stroke-dasharray: 6 4; stroke-width: 1.5; }}
.autoshard svg .limit-text {{ fill: var(--limit); }} .autoshard svg .grid {{ stroke: var(--faint); }}
.autoshard svg .moment {{ fill: transparent; }} .autoshard svg .moment:hover {{ fill: var(--ink); fill-opacity: 0.18; }}
.autoshard .legend {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 2px 18px;
  margin-top: 10px; font-size: 13px; }}
.autoshard .legend div {{ display: flex; align-items: baseline; overflow-wrap: anywhere; }}
.autoshard .legend .number {{ margin-left: auto; padding-left: 10px; white-space: nowrap; }}
@media (max-width: 640px) {{ .autoshard {{ padding: 14px; }} .autoshard .leaf {{ margin-left: 18px; }}
  .autoshard .tree details {{ margin-left: 8px; }} .autoshard svg text {{ font-size: 22px; }} }}
"""


def part_colour(index: int, kind: str) -> str:
    """The colour of a part of memory: of the so many-th part of its kind."""
    colours = _COOL if kind == "argument" else _WARM
    return colours[index % len(colours)]
