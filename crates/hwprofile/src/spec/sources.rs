//! The documents that the specification table was looked up in, in 2026.
//!
//! Trade-off: data sheets are PDF files behind forms, so many were read in somebody's account; `Voice` says so.

use super::figure::{Source, Voice};

const fn maker(title: &'static str, url: &'static str) -> Source {
    Source { title, url, voice: Voice::Maker }
}

const fn account(title: &'static str, url: &'static str) -> Source {
    Source { title, url, voice: Voice::Account }
}

/// Makers' figures per chip, without sparsity, with links to each maker's page.
pub(super) static OVERVIEW: Source = account(
    "ml-engineering, chapter Accelerators (2026), from the makers' pages",
    "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator",
);
/// The same chapter's table of best measured matrix products.
pub(super) static BEST_GEMM: Source = Source {
    title: "ml-engineering, maximum achievable matmul FLOPS (2026)",
    url: "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator",
    voice: Voice::Measurement,
};
pub(super) static A100_NOTES: Source =
    account("glennklockwood.com on the A100 (NVIDIA data sheet)", "https://glennklockwood.com/garden/processors/A100");
pub(super) static A100_FORMS: Source = account(
    "Thunder Compute, A100 specifications by form factor",
    "https://www.thundercompute.com/blog/nvidia-a100-specs-full-guide",
);
pub(super) static H100_PAGE: Source =
    account("NVIDIA H100 product page (2026), quoted", "https://www.nvidia.com/en-us/data-center/h100/");
pub(super) static H100_PCIE_BRIEF: Source = maker(
    "NVIDIA H100 PCIe product brief PB-11133-001_v02 (2022)",
    "https://manuals.plus/m/56b0c3ef7d0a1c470c0af8f05a0bd1f29a778007472ba941201fbbb185c9bccd",
);
pub(super) static H200_NOTES: Source =
    account("AI Wiki on the H200 (NVIDIA data sheet)", "https://aiwiki.ai/wiki/nvidia_h200");
pub(super) static B200_NOTES: Source = account(
    "glennklockwood.com on the B200 (NVIDIA Blackwell brief)",
    "https://glennklockwood.com/garden/processors/B200",
);
pub(super) static B300_NOTES: Source = account(
    "glennklockwood.com on the B300 (NVIDIA Blackwell Ultra)",
    "https://glennklockwood.com/garden/processors/B300",
);
pub(super) static B200_SERVER: Source = account(
    "Vultr, HGX B200 hardware overview (2026): nvidia-smi of a server",
    "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview",
);
pub(super) static BLACKWELL_HGX: Source = account(
    "NVIDIA Blackwell brief (2024), HGX B200 and B100, quoted",
    "https://resources.nvidia.com/en-us-blackwell-architecture",
);
pub(super) static GB200_NOTES: Source = account(
    "Grokipedia on the GB200 superchip (NVIDIA GB200 NVL72 page)",
    "https://grokipedia.com/page/NVIDIA_GB200_Superchip",
);
pub(super) static B200_QUERIED: Source = Source {
    title: "torchao, pull request 4002: a B200's memory, bus and clock, as its driver reports them",
    url: "https://github.com/pytorch/ao/pull/4002",
    voice: Voice::Measurement,
};
/// Total memory of several cards, in MiB.
pub(super) static REPORTED_MEMORY: Source = Source {
    title: "Modal, pull request 2797: total memory by nvidia-smi",
    url: "https://github.com/modal-labs/modal-client/pull/2797",
    voice: Voice::Measurement,
};
pub(super) static A40_REPORTED: Source = Source {
    title: "GPU Solutions for Tioga Pass: nvidia-smi of an A40",
    url: "https://github.com/SesameEngineering/Projects",
    voice: Voice::Measurement,
};
pub(super) static B300_SYSTEM: Source = account(
    "NVIDIA aiconfigurator, system file of 8 B300: total memory by nvidia-smi",
    "https://github.com/ai-dynamo/aiconfigurator",
);
pub(super) static GH200_SHEET: Source = account(
    "NVIDIA GH200 data sheet, quoted",
    "https://nvdam.widen.net/s/rrgqqnpbz8/grace-datasheet-gh200-grace-hopper-superchip-3773000",
);
pub(super) static A30_CATALOG: Source = account("Hugging Face, hardware: A30", "https://huggingface.co/hardware/a30");
pub(super) static L4_PAGE: Source =
    account("NVIDIA L4 data sheet, quoted", "https://www.nvidia.com/en-us/data-center/l4/");
pub(super) static L40S_TABLE: Source =
    account("NVIDIA L40 and L40S data sheets, copied", "https://www.mullet.se/product.html?product_id=355414");
pub(super) static GA102_PAPER: Source = account(
    "NVIDIA GA102 architecture paper V2 (2021), quoted",
    "https://docslib.org/doc/759549/nvidia-ampere-ga102-gpu-architecture-whitepaper",
);
pub(super) static A40_TABLE: Source = account(
    "NVIDIA A40 data sheet, copied",
    "https://www.ecer.com/corp/details-uuuedqa-p1bsay9-multi-display-setups-supported-by-48gb-gddr6-ecc-memory-nvidia-a40-gpu-and-vga-outputs.html",
);
pub(super) static ADA_PAPER: Source = account(
    "NVIDIA Ada architecture paper V2.1 (2023), appendix A, quoted",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
);
pub(super) static RTX_BLACKWELL_PAPER: Source = account(
    "NVIDIA RTX Blackwell architecture paper (2025), quoted",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
);
pub(super) static RTX_COMPARED: Source = account(
    "FPSBench, RTX 5090 and 4090 D",
    "https://fpsbench.com/compare/gpu/nvidia-geforce-rtx-4090-d-vs-nvidia-geforce-rtx-5090",
);
pub(super) static RTX_CATALOG: Source =
    account("Hugging Face data set ohdoking/gpu_spec", "https://huggingface.co/datasets/ohdoking/gpu_spec");
pub(super) static MI300X_PAGE: Source = account(
    "AMD MI300X and MI325X pages, quoted",
    "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
);
pub(super) static MI300X_CATALOG: Source =
    account("gpu.blog on the MI300X", "https://gpu.blog/gpus/instinct-mi300x-mi300x");
pub(super) static MI355X_NOTES: Source =
    account("AI Wiki on the MI355X (AMD, 2025)", "https://aiwiki.ai/wiki/amd_instinct_mi355x");
pub(super) static AMD_SPECS: Source =
    maker("AMD GPU specifications (ROCm 7.13)", "https://rocm.docs.amd.com/en/7.13.0-preview/reference/gpu-specs.html");
pub(super) static GAUDI_SLIDES: Source =
    maker("Intel, Gaudi 3 at Hot Chips (August 2024)", "https://www.sgpjbg.com/baogao/465025.html");
pub(super) static PONTE_VECCHIO: Source = account(
    "glennklockwood.com on Ponte Vecchio (Intel ARK, Aurora's measurements)",
    "https://glennklockwood.com/garden/processors/pvc",
);
pub(super) static APPLE_M4: Source = account(
    "Apple on the M4 Max (October 2024), reported",
    "https://macmegasite.com/2024/10/30/m4-max-chip-has-16-core-cpu-40-core-gpu-and-35-increase-in-memory-bandwidth",
);
pub(super) static APPLE_GPUS: Source = account(
    "HMC Tech, M4 Max of 32 cores and M3 Max of 40 cores",
    "https://hmc-tech.com/gpu/apple-32-core-m4-max-vs-apple-40-core-m3-max",
);
pub(super) static APPLE_M3_ULTRA: Source =
    account("TechPowerUp on the Mac Studio (March 2025)", "https://techpowerup.com/news-tags/Mac%20Studio");
pub(super) static TPU_V5E: Source = maker("Google Cloud TPU v5e", "https://docs.cloud.google.com/tpu/docs/v5e");
pub(super) static TPU_V5P: Source = maker("Google Cloud TPU v5p", "https://docs.cloud.google.com/tpu/docs/v5p");
pub(super) static TPU_V6E: Source = maker("Google Cloud TPU v6e", "https://docs.cloud.google.com/tpu/docs/v6e");
/// What the card itself reports.
pub(crate) static DRIVER: Source = maker("this card's clocks, cores and bus, as its driver reports them", "NVML");
pub(super) static RTX_3090_TABLE: Source = account(
    "Tables of the RTX 3090 (2022), from NVIDIA's figures",
    "https://holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-3090-specifications.html",
);
pub(super) static RTX_3090_TI_NEWS: Source = account(
    "TweakTown on the RTX 3090 Ti (2022)",
    "https://www.tweaktown.com/news/84164/nvidia-geforce-rtx-3090-ti-full-specs-price-performance-details/index.html",
);
pub(super) static A10_COMPARED: Source = account(
    "Baseten, A10 and A10G (2023), from their data sheets",
    "https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/",
);
pub(super) static A10_CATALOG: Source = account(
    "sysrqmts.com on the A10 PCIe",
    "https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000",
);
pub(super) static A6000_CATALOG: Source = account(
    "sysrqmts.com on the RTX A6000",
    "https://sysrqmts.com/tr/gpus/compare/nvidia-a16-pcie-vs-nvidia-rtx-a6000",
);
pub(super) static L4_SHOP: Source = account(
    "Source Code on the L4 (NVIDIA data sheet)",
    "https://store.sourcecode.com/en-us/bg-bucket-compare/125/9820",
);
pub(super) static NVLINK_PAGE: Source =
    maker("NVIDIA on NVLink (A100 generation)", "https://www.nvidia.com/de-de/data-center/nvlink/");
pub(super) static MI325X_PAGE: Source =
    account("Wiaix on the MI325X (AMD data sheet)", "https://wiaix.com/amd-instincttm-mi325x-accelerators");
pub(super) static MI355X_LINKS: Source = account(
    "Hume Consulting on the MI355X (2025)",
    "https://humeconsulting.co/amd-mi355x-strong-node-level-inference-but-not-yet-rack-scale",
);
pub(super) static APPLE_M3: Source = account(
    "Clubic on the M3, M3 Pro and M3 Max (Apple, 2023)",
    "https://www.clubic.com/actualite-507205-avec-ses-puces-m3-m3-pro-et-m3-max-apple-essaye-encore-de-vous-faire-jouer-sur-mac.html",
);
