//! The device of this process: opened by CubeCL with all that the adapter offers, and used by CubeCL and by launches of our own.
//!
//! CubeCL opens it for [`WgpuDevice::DefaultDevice`], unless something has used that device before. So programs ask [`probe`] or
//! [`MemoryOps::device_of`](crate::MemoryOps::device_of) first, as `train` does.
//! Errors that no scope of ours catches are CubeCL's: on its threads they unwind, so that a read fails instead of returning old values. A lost device
//! is known by a callback alone.
//! Trade-off: one adapter per process, the one that the system calls the fastest.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, OnceLock};

use cubecl::client::ComputeClient;
use cubecl::future::block_on;
use cubecl::prelude::Runtime;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, RuntimeOptions, WgpuDevice, WgpuRuntime, WgpuSetup, init_setup};
use wgpu::{Features, Limits};

use crate::backends::on_cubecl::{DeviceFailure, configure, loss, note_loss, note_message};

/// The device, its queue, and what it can do.
pub(crate) struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub client: ComputeClient<WgpuRuntime>,
    pub limits: Limits,
    pub features: Features,
    /// How matrix units are used, or why not.
    pub matrices: Result<Matrices, &'static str>,
}

/// Matrix units, which multiply matrices of 16 x 16 values in float16 and sum in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrices {
    /// Lanes of the subgroup that a matrix belongs to.
    pub lanes: usize,
    /// Whether plain code takes their place.
    pub are_emulated: bool,
}

impl Matrices {
    fn of(adapter: &wgpu::Adapter) -> Result<Self, &'static str> {
        use wgpu::CooperativeScalarType::{F16, F32};
        let has_shape = |found: &wgpu::CooperativeMatrixProperties| {
            (found.m_size, found.n_size, found.k_size) == (16, 16, 16) && (found.ab_type, found.cr_type) == (F16, F32)
        };
        let info = adapter.get_info();
        if info.backend != wgpu::Backend::Vulkan {
            return Err("matrix units are used through Vulkan alone so far");
        }
        if !adapter.features().contains(Features::SHADER_F16 | Features::SUBGROUP_BARRIER) {
            return Err("its shaders have no float16, or no barriers of subgroups");
        }
        let limits = adapter.limits();
        let threads = 8 * info.subgroup_max_size;
        if limits.max_compute_workgroup_storage_size < 48 << 10
            || limits.max_compute_invocations_per_workgroup < threads
        {
            return Err("its workgroups are too small for the tiles of matrices");
        }
        if !adapter.cooperative_matrix_properties().iter().any(has_shape) {
            return Err("it offers no matrices of 16 x 16 with operands in float16 and sums in float32");
        }
        Ok(Self { lanes: info.subgroup_max_size as usize, are_emulated: false })
    }
}

static GPU: OnceLock<Result<Gpu, String>> = OnceLock::new();

/// Looks for a device that wgpu can compute on, and opens it: CubeCL would panic without one.
pub(in crate::backends) fn probe() -> Result<(), String> {
    GPU.get_or_init(open).as_ref().map(|_| ()).map_err(Clone::clone)
}

/// Returns what keeps the device from offering matrix units that kernels use; `None` if it offers them.
pub(in crate::backends) fn lacks_matrices() -> Option<&'static str> {
    match GPU.get_or_init(open) {
        Ok(gpu) => gpu.matrices.err(),
        Err(_) => Some("there is no device"),
    }
}

impl Gpu {
    /// Returns the device; the first call opens it.
    pub(crate) fn get() -> &'static Self {
        let opened = GPU.get_or_init(open).as_ref();
        opened.unwrap_or_else(|message| {
            let message = message.clone();
            DeviceFailure { operation: "opening the device", out_of_memory: false, message }.raise()
        })
    }

    /// Unwinds from `operation` if the device is lost.
    pub(crate) fn check(&self, operation: &'static str) {
        if let Some(message) = loss() {
            DeviceFailure { operation, out_of_memory: false, message }.raise()
        }
    }

    /// Runs work of wgpu, and unwinds from `operation` with what was wrong with it.
    pub(crate) fn scoped<R>(&self, operation: &'static str, work: impl FnOnce() -> R) -> R {
        let filters = [wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation];
        let scopes = filters.map(|filter| self.device.push_error_scope(filter));
        let result = work();
        // The innermost scope is the last.
        let errors: Vec<_> = scopes.into_iter().rev().filter_map(|scope| block_on(scope.pop())).collect();
        if let Some(error) = errors.into_iter().next() {
            let out_of_memory = matches!(error, wgpu::Error::OutOfMemory { .. });
            DeviceFailure { operation, out_of_memory, message: error.to_string() }.raise();
        }
        result
    }
}

fn open() -> Result<Gpu, String> {
    find_adapter()?;
    let setup = catch_unwind(|| {
        configure();
        init_setup::<AutoGraphicsApi>(&WgpuDevice::DefaultDevice, RuntimeOptions::default())
    });
    let WgpuSetup { adapter, device, queue, .. } = setup.map_err(|panic| {
        let text =
            panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        format!("CubeCL could not open the device, or has opened it before: {}", text.unwrap_or_default())
    })?;
    let missing = [Features::IMMEDIATES].into_iter().find(|feature| !device.features().contains(*feature));
    if let Some(feature) = missing {
        return Err(format!("the driver of {} lacks {feature:?}", adapter.get_info().name));
    }
    device.set_device_lost_callback(|reason, text| note_loss(&format!("{reason:?}: {text}")));
    device.on_uncaptured_error(Arc::new(|error: wgpu::Error| {
        note_message(error.to_string());
        if std::thread::current().name().is_some_and(|name| name.starts_with("DSD-")) {
            resume_unwind(Box::new("an error of wgpu"));
        }
    }));
    Ok(Gpu {
        limits: device.limits(),
        features: device.features(),
        matrices: Matrices::of(&adapter),
        client: WgpuRuntime::client(&WgpuDevice::DefaultDevice),
        device,
        queue,
    })
}

/// Requests the adapter that CubeCL will request, which panics if there is none.
fn find_adapter() -> Result<(), String> {
    let backend = AutoGraphicsApi::backend();
    let descriptor =
        wgpu::InstanceDescriptor { backends: backend.into(), ..wgpu::InstanceDescriptor::new_without_display_handle() };
    let found = catch_unwind(AssertUnwindSafe(|| {
        block_on(wgpu::Instance::new(descriptor).request_adapter(&wgpu::RequestAdapterOptions::default()))
    }));
    match found {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format!("no {backend:?} adapter ({error})")),
        Err(_) => Err(format!("the driver of {backend:?} failed while it listed its adapters")),
    }
}
