//! Compiled programs, by source and constants.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::gpu::Gpu;
use super::template::{self, Constants};

/// A kernel: a template with the values that make a program of it.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// The operation, for traces and errors.
    pub name: &'static str,
    /// Its template.
    pub template: &'static str,
    /// Values that the template uses.
    pub constants: Vec<(&'static str, u32)>,
}

/// Texts of one binary are equal if they are at one place; to compare or hash whole templates would take longer than a launch.
impl PartialEq for Kernel {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.name, other.name)
            && std::ptr::eq(self.template, other.template)
            && self.constants == other.constants
    }
}

impl Eq for Kernel {}

impl Hash for Kernel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.as_ptr().hash(state);
        self.template.as_ptr().hash(state);
        self.constants.iter().for_each(|(name, value)| (name.as_ptr(), value).hash(state));
    }
}

pub(super) struct Program {
    pub name: &'static str,
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
    /// Identifies it among the programs of this engine.
    pub number: u32,
    /// Number of operands.
    pub operands: usize,
    /// Which operands are only read.
    pub only_read: Vec<bool>,
}

#[derive(Default)]
pub(super) struct Programs {
    /// By kernel, and whether an operand shares its memory with a result.
    known: RefCell<FxHashMap<(Kernel, bool), Rc<Program>>>,
}

impl Programs {
    pub(super) fn get(&self, gpu: &Gpu, kernel: &Kernel, are_aliased: bool) -> Rc<Program> {
        let key = (kernel.clone(), are_aliased);
        if let Some(known) = self.known.borrow().get(&key) {
            return known.clone();
        }
        let number = self.known.borrow().len() as u32;
        let program = Rc::new(gpu.scoped(kernel.name, || compile(gpu, kernel, are_aliased, number)));
        self.known.borrow_mut().insert(key, program.clone());
        program
    }
}

/// Bytes of the parameters that launches pass, which every adapter allows.
pub(super) const PARAMETER_BYTES: u32 = 128;

pub(super) fn text(kernel: &Kernel, are_aliased: bool) -> String {
    let constants: Constants = kernel.constants.iter().copied().collect::<BTreeMap<_, _>>();
    template::expand(kernel.template, &constants, are_aliased)
}

fn compile(gpu: &Gpu, kernel: &Kernel, are_aliased: bool, number: u32) -> Program {
    let text = text(kernel, are_aliased);
    let only_read = template::bindings(&text);
    let label = Some(kernel.name);
    let source = wgpu::ShaderSource::Wgsl(text.into());
    let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::checked() };
    // SAFETY: every loop of our kernels ends; accesses outside of buffers are checked.
    let module =
        unsafe { gpu.device.create_shader_module_trusted(wgpu::ShaderModuleDescriptor { label, source }, checks) };
    let entry = |(binding, &read_only): (usize, &bool)| wgpu::BindGroupLayoutEntry {
        binding: binding as u32,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    };
    let entries: Vec<_> = only_read.iter().enumerate().map(entry).collect();
    let layout = gpu.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries });
    let pipeline_layout = gpu.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label,
        bind_group_layouts: &[Some(&layout)],
        immediate_size: PARAMETER_BYTES,
    });
    let pipeline = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label,
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: false,
            ..Default::default()
        },
        cache: None,
    });
    Program { name: kernel.name, pipeline, layout, number, operands: only_read.len(), only_read }
}

/// Compiles a kernel for Vulkan and Metal, as wgpu does on a machine that has matrix units.
#[cfg(test)]
pub(in crate::backends::wgpu) fn compile_elsewhere(kernel: &Kernel) {
    let text = text(kernel, false);
    let module = naga::front::wgsl::parse_str(&text).unwrap_or_else(|error| panic!("{}", error.emit_to_string(&text)));
    let flags = naga::valid::ValidationFlags::all();
    let mut validator = naga::valid::Validator::new(flags, naga::valid::Capabilities::all());
    let info = validator.validate(&module).unwrap_or_else(|error| panic!("{}", error.emit_to_string(&text)));
    let options = naga::back::spv::Options { lang_version: (1, 6), ..Default::default() };
    let words = naga::back::spv::write_vec(&module, &info, &options, None).expect("it is SPIR-V");
    assert!(words.len() > 1000);
    let options = naga::back::msl::Options { lang_version: (3, 1), ..Default::default() };
    let (metal, _) = naga::back::msl::write_string(&module, &info, &options, &Default::default()).expect("it is MSL");
    assert!(metal.contains("simdgroup"), "{metal}");
}
