"""The learning signal in the training logs of [VLS]'s authors, beside runs of yours: a table and vls.png.

    python -m assets.vls_table [RUN_FOLDER ...]    # in the project's folder; runs of train.py --method opd

mu = G^2/(2L) of gradient norm G and loss L. The table is [VLS Table E.3], see ntk.signal_drop. Its last
column counts the checkpoints at which the occupancy term lets the loss fall [VLS E.1]. The picture shows
medians of nine steps. The logs are in assets/vls, see SOURCE.md there.
"""
import csv, math, pathlib, sys

from matplotlib.figure import Figure

import ntk, train

def read_curves(folders):
    """{name: {split, training: [(loss, gradient norm)], occupancy: [(g2, X)]}}: runs of [VLS], then yours."""
    columns = {"training": ("opd_loss", "grad_norm_preclip"), "occupancy": ("g2_crossfit", "X_dot")}
    curves = {}
    for path in sorted((pathlib.Path(__file__).parent / "vls").glob("*.csv"), reverse=True):
        task, table = path.stem.split("_")
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            empty = {"split": 30 if task == "math" else 15, "training": [], "occupancy": []}
            values = [float(row[name]) if row[name] else None for name in columns[table]]
            curves.setdefault(row["teacher"], empty)[table].append(values)
    for folder in map(pathlib.Path, folders):
        if train.read_json(folder / "config.json")["method"] != "opd":
            raise ValueError(f"{folder} is no run of --method opd: its gradient norm has other parts")
        lines = train.read_log(folder / "metrics.jsonl")[1:]
        if not lines:
            raise ValueError(f"{folder} has no step yet")
        pairs = [(line.get("occupancy_g2"), line.get("occupancy_X")) for line in lines]
        training = [(line["loss_D"], line["grad_norm"]) for line in lines]
        occupied = [pair for pair in pairs if pair[0]]
        curves[str(folder)] = {"split": 30, "training": training, "occupancy": occupied}
    return curves

def show_curves(curves, file):
    figure, rows = Figure(figsize=(9, 4.6), layout="constrained"), []
    axes = figure.subplots(1, 2)
    for name, curve in curves.items():
        losses, norms = zip(*curve["training"])
        drop = ntk.signal_drop(losses, norms, curve["split"])
        falls = [1 + X / g2 > 0 for g2, X in curve["occupancy"]]
        rows.append([name, curve["split"], *drop.values(), f"{sum(falls)} of {len(falls)}"])
        mu = [ntk.learning_signal(G, L) for G, L in zip(norms, losses)]
        for axis, values in zip(axes, (mu, [L and L / losses[0] for L in losses])):
            smooth = [ntk.median(values[max(i - 4, 0):i + 5]) for i in range(len(values))]
            smooth = [x if x > 0 else math.nan for x in smooth]  # a top-k loss below 0 has no logarithm
            axis.plot(range(1, len(smooth) + 1), smooth, label=pathlib.Path(name).name, linewidth=1.8)
    for axis, title in zip(axes, ("learning signal mu", "remaining loss L/L_1")):
        axis.set(yscale="log")
        axis.set_title(f"{title}, by step", fontsize=14)
        axis.tick_params(labelsize=12)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=12)
    figure.savefig(file, dpi=110)
    ntk.print_table("mu before and after the split; 1 + X/g^2 > 0: checkpoints where the loss falls",
                    ["run", "split", *drop, "1 + X/g^2 > 0"], rows)
    print(f"wrote {file}")

def main(folders):
    with train.or_fail("vls_table wants folders of runs of train.py"):
        curves = read_curves(folders)
    show_curves(curves, "vls.png")

if __name__ == "__main__":
    main(sys.argv[1:])
