"""Draw docs/images/step.png: where a step of the 8B goes, and how near each operation is to its peak (needs matplotlib).

Each traced report in h100-full-recompute-and-short-rows.json is one panel: an operation is as wide as its share of the step and as high as
its share of the peak that limits it, 8-bit multiplication, 16-bit multiplication or memory, each measured in the same run.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

here = Path(__file__).parent
reports = json.loads((here / "h100-full-recompute-and-short-rows.json").read_text())
traced = [report for report in reports if report["trace"] and "8B" in report["model"]]


def kind(operation):
    if operation["name"].endswith("fp8"):
        return "C0", "8-bit GEMMs"
    if operation["name"].startswith("attention"):
        return "C3", "attention"
    if operation["gemm"] and operation["bound"] == "math":
        return "C1", "16-bit GEMMs"
    return "C2", "passes over memory"


figure, panels = plt.subplots(len(traced), 1, figsize=(11, 3.6 * len(traced)), squeeze=False)
for panel, report in zip(panels[:, 0], traced):
    peaks = report["peaks"]
    operations = sorted(report["trace"]["operations"], key=lambda one: (kind(one)[1], -one["ms"]))
    left, seen = 0.0, set()
    for operation in operations:
        color, label = kind(operation)
        peak = peaks.get("fp8_gemm_tflops") if label == "8-bit GEMMs" else peaks["gemm_tflops"]
        height = operation["tflops"] / peak if operation["bound"] == "math" else operation["roofline_share"]
        width = 100 * operation["share"]
        panel.bar(left, 100 * height, width, align="edge", color=color, edgecolor="white", linewidth=0.4,
                  label=None if label in seen else label)
        if width > 3:
            name = "×".join(map(str, operation["gemm"])) if operation["gemm"] else operation["name"].replace("_", " ")
            panel.text(left + width / 2, 3, name, rotation=90, ha="center", va="bottom", fontsize=7, color="white")
        left += width
        seen.add(label)
    panel.axhline(100, color="gray", linewidth=0.6)
    arithmetic = "FP8" if report["gemms"] == "fp8" else "bf16"
    panel.set_title(f"{report['model'].split()[-1]}, {arithmetic}, {report['micro_batch']} × {report['seq']} tokens, "
                    f"{report['recompute']}: {1000 * report['step_s']['median']:.0f} ms", fontsize=10)
    panel.set_xlim(0, 100)
    panel.set_ylabel("% of peak")
    panel.legend(frameon=False, ncols=4, fontsize=8, loc="upper right", bbox_to_anchor=(1, 1.02))
panels[-1, 0].set_xlabel("% of the step")
figure.tight_layout()
figure.savefig(here / "../../docs/images/step.png", dpi=110)
