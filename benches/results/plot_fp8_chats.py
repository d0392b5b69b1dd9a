"""Draw docs/images/fp8-300-steps.png from smollm2-fp8-300-steps.csv: python plot_fp8_chats.py (needs matplotlib)."""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

here = Path(__file__).parent
with (here / "smollm2-fp8-300-steps.csv").open() as file:
    rows = list(csv.DictReader(file))

steps = [int(row["step"]) for row in rows]
figure, panels = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True)
for column, rate in enumerate(("2e-4", "2e-5")):
    losses = {way: [float(row[f"{way} at {rate}"]) for row in rows] for way in ("bf16", "fp8")}
    for way, style in (("bf16", "C1-"), ("fp8", "C0--")):
        smooth = [sum(losses[way][max(0, i - 9) : i + 1]) / (i + 1 - max(0, i - 9)) for i in range(len(steps))]
        panels[0][column].plot(steps, smooth, style, linewidth=1.2, label=way)
    apart = [fp8 - bf16 for fp8, bf16 in zip(losses["fp8"], losses["bf16"])]
    panels[1][column].plot(steps, apart, "C0", linewidth=0.9, label="fp8 - bf16")
    panels[0][column].set_title(f"learning rate {rate}")
    panels[1][column].axhline(0, color="gray", linewidth=0.5)
    panels[1][column].set_xlabel("step")
for panel, label in ((panels[0][0], "loss (mean of 10 steps)"), (panels[1][0], "difference of the losses")):
    panel.set_ylabel(label)
for panel in panels.flat:
    panel.legend(frameon=False)
figure.tight_layout()
figure.savefig(here / "../../docs/images/fp8-300-steps.png", dpi=110)
