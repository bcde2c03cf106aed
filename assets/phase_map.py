"""Draws phase-map.png and prints its table: who wins at which share of wrong hints and learning rate.

    python -m assets.phase_map FOLDER ...    # of `python train.py --preset map-misled ...`, one for each cell

A cell is one folder of runs METHOD-SEED. Sampled reward is the mean of the last 20 steps. The lead is the
distance of the two best means in standard errors of their difference: below 2 there is no winner.
"""
import collections, pathlib, statistics, sys

from matplotlib.figure import Figure

import train

COLOURS = {"grpo": "#777777", "opd": "#c98a1b", "hybrid": "#3f8f4f", "m3-norm": "#a9c4e8",
           "m3-random": "#d9d2e9", "m3-select": "#5b8fd0", "m3-soft": "#1f5aa8", "m3-eg": "#7a4fa3"}

def read_cells(folders):
    """{(P, lr): {method: [summary of each seed]}}"""
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for folder in map(pathlib.Path, folders):
        for path in sorted(folder.glob("*/summary.json")):
            config = train.read_json(path.parent / "config.json")
            cell = cells[config["hint_error"], config["lr"]]
            cell[config["method"]].append(train.read_json(path))
    return cells

def check(cells):
    """Ends the program, in one line, where a cell cannot be drawn."""
    for (share, rate), cell in cells.items():
        for method in COLOURS:
            count = len(cell[method])
            if count < 2:
                train.fail(f"phase_map: P {share}, lr {rate} has {count} runs of {method}: want two or more")
    if not cells:
        train.fail("phase_map: no runs: name folders of train.py --preset map-misled")

def moments(summaries, key):
    """mean, standard deviation, squared standard error over seeds"""
    values = [summary[key] for summary in summaries]
    spread = statistics.stdev(values)
    return statistics.mean(values), spread, spread ** 2 / len(values)

def verdict(cell):
    """The best method by sampled reward, the next, and the lead in standard errors."""
    found = {method: moments(cell[method], "reward_last20") for method in COLOURS}
    best, second = sorted(found, key=found.get, reverse=True)[:2]
    error = (found[best][2] + found[second][2]) ** 0.5
    return best, second, (found[best][0] - found[second][0]) / max(error, 1e-9)

def draw(cells, file):
    shares, rates = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    figure = Figure(figsize=(11, 10), layout="constrained")
    grid = figure.subplots(len(shares), len(rates), sharex=True, sharey=True, squeeze=False)
    for (share, rate), cell in cells.items():
        axis = grid[shares.index(share)][rates.index(rate)]
        for row, (method, colour) in enumerate(COLOURS.items()):
            mean, spread, _ = moments(cell[method], "reward_last20")
            axis.barh(row, mean, color=colour, xerr=spread, error_kw={"linewidth": 1})
        best, second, lead = verdict(cell)
        axis.set_title(f"{share:.0%} wrong hints, lr {rate:.0e}\nbest: {best}, {lead:.1f} s.e. over {second}",
                       fontsize=11)
        axis.set(xlim=(0, 1), yticks=range(len(COLOURS)), yticklabels=COLOURS)
        axis.tick_params(labelsize=10.5)
        axis.grid(axis="x", alpha=0.25)
    grid[0][0].invert_yaxis()  # all panels share it
    for axis in grid[-1]:
        axis.set_xlabel("sampled reward, last 20 steps", fontsize=11)
    figure.savefig(file, dpi=110)

def show(cells):
    print("| P, lr | " + " | ".join(COLOURS) + " | best, its lead over the next |")
    print("|---" * (len(COLOURS) + 2) + "|")
    for (share, rate), cell in sorted(cells.items()):
        row = []
        for method in COLOURS:
            mean, spread, _ = moments(cell[method], "reward_last20")
            accuracy, *_ = moments(cell[method], "accuracy_end")
            row.append(f"{mean:.3f} ± {spread:.3f} ({accuracy:.2f})".replace("0.", "."))
        best, second, lead = verdict(cell)
        print(f"| {share:g}, {rate:.0e} | " + " | ".join(row) + f" | {best}, {lead:.1f} s.e. over {second} |")

if __name__ == "__main__":
    found = read_cells(sys.argv[1:])
    check(found)
    draw(found, "phase-map.png")
    show(found)
