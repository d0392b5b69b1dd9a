"""Draw the runs of 300 steps in docs/images from their CSV files: python plot_300_steps.py (needs matplotlib)."""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

here = Path(__file__).parent


def draw(data, image, styles, base):
    """Losses of each way in `styles`, and below them their differences from `base`; one column per learning rate."""
    with (here / data).open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    figure, panels = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True)
    for column, rate in enumerate(("2e-4", "2e-5")):
        losses = {way: [float(row[f"{way} at {rate}"]) for row in rows] for way in styles}
        for way, style in styles.items():
            smooth = [sum(losses[way][max(0, i - 9) : i + 1]) / (i + 1 - max(0, i - 9)) for i in range(len(steps))]
            panels[0][column].plot(steps, smooth, style, linewidth=1.2, label=way)
        for way in styles:
            if way != base:
                apart = [a - b for a, b in zip(losses[way], losses[base])]
                panels[1][column].plot(steps, apart, styles[way][:2], linewidth=0.9, label=f"{way} - {base}")
        panels[0][column].set_title(f"learning rate {rate}")
        panels[1][column].axhline(0, color="gray", linewidth=0.5)
        panels[1][column].set_xlabel("step")
    for panel, label in ((panels[0][0], "loss (mean of 10 steps)"), (panels[1][0], "difference of the losses")):
        panel.set_ylabel(label)
    for panel in panels.flat:
        panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(here / "../../docs/images" / image, dpi=110)


draw("adapters-300-steps.csv", "adapters-300-steps.png", {"separate": "C1-", "merged": "C2-", "appended": "C0--"}, "appended")
draw("smollm2-fp8-300-steps.csv", "fp8-300-steps.png", {"bf16": "C1-", "fp8": "C0--"}, "bf16")
