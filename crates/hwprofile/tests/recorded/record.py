"""Writes what NVML says about the first card as JSON, in the form of `NvmlDescription`: python3 record.py > h100.json

It calls NVML through ctypes, independently of the Rust code that the recording tests. The identifier is replaced. h100.json has what these
calls answered on one H100 80GB HBM3, given to a virtual machine, driver 580.159.04."""
import ctypes as c
import json

nvml = c.CDLL("libnvidia-ml.so.1")
nvml.nvmlInit_v2()


def get(name, *args):
    value = c.c_uint()
    return value.value if getattr(nvml, "nvml" + name)(*args, c.byref(value)) == 0 else None


def text(name, *args):
    value = c.create_string_buffer(96)
    getattr(nvml, "nvml" + name)(*args, value, 96)
    return value.value.decode()


def pair(name, device):
    a, b = c.c_int(), c.c_int()
    return [a.value, b.value] if getattr(nvml, "nvml" + name)(device, c.byref(a), c.byref(b)) == 0 else None


def handle(index):
    device = c.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, c.byref(device))
    return device


D = "DeviceGet"


def card(index):
    device = handle(index)
    memory = (c.c_ulonglong * 3)()
    nvml.nvmlDeviceGetMemoryInfo(device, memory)
    return {
        "index": index,
        "uuid": f"GPU-{index:08d}-0000-0000-0000-000000000000",
        "name": text(D + "Name", device),
        "memory_total_bytes": memory[0],
        "memory_free_bytes": memory[1],
        "compute_capability": pair(D + "CudaComputeCapability", device),
        "clocks": {
            "sm_mhz": get(D + "MaxClockInfo", device, 1),
            "memory_mhz": get(D + "MaxClockInfo", device, 2),
            "cores": get(D + "NumGpuCores", device),
            "bus_bits": get(D + "MemoryBusWidth", device),
        },
        "power_limit_mw": get(D + "EnforcedPowerLimit", device),
        "power_default_mw": get(D + "PowerManagementDefaultLimit", device),
        "pcie": {
            "generation": get(D + "MaxPcieLinkGeneration", device),
            "lanes": get(D + "MaxPcieLinkWidth", device),
        },
        "mig_enabled": (pair(D + "MigMode", device) or [0])[0] == 1,
        "slices": [],
    }


print(json.dumps({"driver_version": text("SystemGetDriverVersion"), "cards": [card(0)], "unreadable": []}, indent=1))
