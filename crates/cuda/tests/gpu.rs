//! Memory, copies, compiled programs and launches on a real device. Without a driver or NVRTC, a test returns early.
//!
//! `cargo test -p firebrick-cuda --test gpu`
//!
//! Not supported: devices other than number 0.

#![allow(unsafe_code, reason = "copies and launches are promises about memory, which the tests make")]

mod device;

use device::Device;
use firebrick_cuda::{
    Arguments, Compiler, CudaError, DeviceBuffer, Kernel, LaunchShape, Module, PinnedBuffer, Program, Repeats,
};

const COUNT: usize = 1000;

const SOURCE: &str = r#"
struct Line { float slope; char unused; double offset; };

extern "C" __global__ void line(float *y, const float *x, Line line, long long count) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (long long)blockDim.x)
        y[i] = line.slope * x[i] + (float)line.offset;
}

extern "C" __global__ void reversed(float *x, int count) {
    extern __shared__ float held[];
    for (int i = threadIdx.x; i < count; i += blockDim.x) held[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) x[i] = held[count - 1 - i];
}
"#;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Line {
    slope: f32,
    unused: [u8; 4],
    offset: f64,
}

fn device_and_module() -> Option<(Device, Module)> {
    let gpu = Device::find()?;
    let compiler = Compiler::load().ok()?;
    let device = gpu.context.driver().device(gpu.context.ordinal()).expect("a device");
    let program = Program { name: "gpu.cu".to_string(), source: SOURCE.to_string(), options: Vec::new() };
    let image = compiler.compile(&program, device.compute_capability).expect("it compiles");
    let again = compiler.compile(&program, device.compute_capability).expect("it compiles");
    assert_eq!(image, again, "a cached image equals a compiled one");
    let module = Module::load(&gpu.context, &image).expect("it was compiled for this device");
    Some((gpu, module))
}

const SHAPE: LaunchShape = LaunchShape { grid: [4, 1, 1], block: [64, 1, 1], shared_bytes: 0, starts_early: false };

fn arguments_of_line(y: &DeviceBuffer, x: &DeviceBuffer, line: &Line) -> Arguments {
    Arguments::new().address(y.address()).address(x.address()).value(line).i64(COUNT as i64)
}

fn request_line(repeats: &Repeats, kernel: &Kernel, y: &DeviceBuffer, x: &DeviceBuffer, line: Line) {
    let launch = (kernel.clone(), arguments_of_line(y, x, &line));
    // SAFETY: the arguments are those of `line`, kernel and arguments are what is hashed, and the buffers outlive the work.
    let requested = unsafe {
        repeats.submit("line", launch, |(kernel, arguments), stream| kernel.launch(stream, SHAPE, arguments))
    };
    requested.expect("submitted");
}

fn values() -> Vec<f32> {
    (0..COUNT).map(|value| value as f32).collect()
}

#[test]
fn copies_through_pinned_memory_keep_every_byte() {
    let Some(gpu) = Device::find() else { return };
    // The driver's memory, pages that one thread writes, and pages that several do.
    for count in [COUNT, 1_500_001, 9_000_001] {
        let values: Vec<f32> = (0..count).map(|value| value as f32).collect();
        let fresh = PinnedBuffer::new(&gpu.context, 4 * count).expect("pinned memory");
        assert!(fresh.iter().all(|byte| *byte == 0) && fresh.len() == 4 * count);
        let first = gpu.upload(&values);
        assert_eq!(gpu.download::<f32>(&first), values);
        let second = gpu.upload(&vec![0.0; count]);
        assert!(gpu.download::<f32>(&second).iter().all(|value| *value == 0.0));
        assert_eq!(gpu.download::<f32>(&first), values);
    }
}

#[test]
fn a_kernel_outlives_its_module() {
    let Some((gpu, module)) = device_and_module() else { return };
    let kernel = module.kernel("line").expect("it is in the program");
    drop(module);
    let (x, y) = (gpu.upload(&values()), gpu.upload(&vec![f32::NAN; COUNT]));
    let arguments = arguments_of_line(&y, &x, &Line { slope: 2.0, unused: [0xff; 4], offset: 0.5 });
    // SAFETY: the arguments are those of `line`, both buffers have COUNT floats, and the download synchronizes.
    unsafe { kernel.launch(&gpu.stream, SHAPE, &arguments) }.expect("launched");
    assert_eq!(gpu.download::<f32>(&y), values().iter().map(|x| 2.0 * x + 0.5).collect::<Vec<_>>());
}

#[test]
fn repeated_launches_become_a_graph() {
    let Some((gpu, module)) = device_and_module() else { return };
    let line = module.kernel("line").expect("it is in the program");
    let repeats = Repeats::new(gpu.stream.clone());
    let buffers: Vec<DeviceBuffer> = (0..5).map(|_| gpu.upload(&values())).collect();
    // Each buffer becomes a line of the previous one; the last line changes from the fifth round on.
    let round = |number: usize| {
        for (index, pair) in buffers.windows(2).enumerate() {
            let slope = if index == 3 { number.max(3) as f32 } else { 2.0 };
            request_line(&repeats, &line, &pair[1], &pair[0], Line { slope, unused: [0; 4], offset: 0.5 });
        }
        repeats.flush().expect("submitted");
        (gpu.download::<f32>(&buffers[4])[7], repeats.in_graphs())
    };
    let rounds: Vec<_> = (0..8).map(round).collect();
    let expected = |slope: f32| slope * (2.0 * (2.0 * (2.0 * 7.0 + 0.5) + 0.5) + 0.5) + 0.5;
    let values: Vec<f32> = rounds.iter().map(|(value, _)| *value).collect();
    assert_eq!(values, [3.0, 3.0, 3.0, 3.0, 4.0, 5.0, 6.0, 7.0].map(expected));
    let in_graphs: Vec<usize> = rounds.iter().map(|(_, launches)| *launches).collect();
    assert_eq!(in_graphs, [0, 0, 4, 4, 4, 4, 4, 4]);
    repeats.release();
    assert_eq!(repeats.in_graphs(), 0);
}

#[test]
fn as_many_graphs_as_are_kept_take_little_memory() {
    let Some((gpu, module)) = device_and_module() else { return };
    let line = module.kernel("line").expect("it is in the program");
    let repeats = Repeats::new(gpu.stream.clone());
    let [x, y] = [0, 1].map(|_: usize| gpu.upload(&values()));
    let free = || gpu.context.memory().expect("memory").free_bytes;
    let sequence = |number: usize, launches: usize| {
        for index in 0..launches {
            let of_sequence = Line { slope: number as f32, unused: [0; 4], offset: index as f64 };
            request_line(&repeats, &line, &y, &x, of_sequence);
        }
        repeats.flush().expect("submitted");
    };
    sequence(0, 4);
    gpu.stream.synchronize().expect("synchronized");
    let before = free();
    // More sequences than there may be graphs, then as many launches in fewer sequences.
    for (sequences, launches, most) in [(600, 4, 512 * 4), (350, 30, 8_192)] {
        for _ in 0..3 {
            (0..sequences).for_each(|number| sequence(number, launches));
        }
        gpu.stream.synchronize().expect("synchronized");
        let (in_graphs, taken) = (repeats.in_graphs(), before.saturating_sub(free()));
        eprintln!("{in_graphs} launches in graphs take {} MiB", taken >> 20);
        assert!(in_graphs <= most && in_graphs + 31 > most, "{in_graphs} launches in graphs");
        assert!(taken < 256 << 20, "{in_graphs} launches in graphs take {taken} bytes");
        repeats.release();
    }
}

#[test]
fn wrong_arguments_are_refused_before_the_launch() {
    let Some((gpu, module)) = device_and_module() else { return };
    let kernel = module.kernel("reversed").expect("it is in the program");
    let shape = LaunchShape { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0, starts_early: false };
    for wrong in [Arguments::new().address(0), Arguments::new().address(0).i64(0)] {
        // SAFETY: the launch is refused, which is tested here; with a count of zero, the kernel would not access memory.
        let error = unsafe { kernel.launch(&gpu.stream, shape, &wrong) }.expect_err("arguments that do not match");
        assert!(matches!(&error, CudaError::WrongArguments { declared, .. } if declared[..] == [8, 4]), "{error}");
    }
    let missing = module.kernel("backwards").err().expect("no such kernel").to_string();
    assert!(missing.contains("backwards") && missing.contains("gpu.cu"), "{missing}");
}

#[test]
fn shared_memory_grows_after_raising_the_limit() {
    let Some((gpu, module)) = device_and_module() else { return };
    let device = gpu.context.driver().device(0).expect("a device");
    assert!(device.shared_memory_per_block_bytes >= 48 << 10, "{device:?}");
    let bytes = device.shared_memory_per_block_bytes;
    let count = bytes as usize / 4;
    let values: Vec<f32> = (0..count).map(|value| value as f32).collect();
    let x = gpu.upload(&values);
    let kernel = module.kernel("reversed").expect("it is in the program");
    kernel.set_dynamic_shared_memory(bytes).expect("what the device has");
    let same = module.kernel("reversed").expect("it is in the program");
    same.set_dynamic_shared_memory(1 << 10).expect("less than before");
    let shape = LaunchShape { grid: [1, 1, 1], block: [256, 1, 1], shared_bytes: bytes, starts_early: false };
    let arguments = Arguments::new().address(x.address()).i32(count as i32);
    // SAFETY: the arguments are those of `reversed`, and the buffer has `count` floats until the download has synchronized.
    unsafe { kernel.launch(&gpu.stream, shape, &arguments) }.expect("launched: the limit was not lowered");
    assert_eq!(gpu.download::<f32>(&x), values.into_iter().rev().collect::<Vec<_>>());
    assert!(kernel.set_dynamic_shared_memory(bytes + 1024).is_err(), "more than the device has");
}

#[test]
fn an_allocation_beyond_the_device_is_an_error() {
    let Some(gpu) = Device::find() else { return };
    let memory = gpu.context.memory().expect("memory");
    let requested = usize::try_from(2 * memory.total_bytes).expect("64 bits");
    let error = DeviceBuffer::new(&gpu.context, requested).err().expect("twice what there is");
    assert!(error.is_out_of_memory());
    let CudaError::OutOfMemory { requested_bytes, free_bytes, total_bytes } = error else { panic!("{error}") };
    assert_eq!((requested_bytes, total_bytes), (requested as u64, memory.total_bytes));
    assert!(free_bytes <= total_bytes);
    assert!(DeviceBuffer::new(&gpu.context, 1 << 20).is_ok(), "the context still works");
}
