//! Order, lifetime and errors of launches next to CubeCL's, each rule in a test. Values are small integers, so equality is exact.
//! Not supported: machines without an adapter; the tests pass there, except in CI.

use burn_tensor::{DType, Tensor, TensorData};
use cubecl::wgpu::WgpuDevice;

use super::{Cost, Engine, Kernel, Operand, Wgpu, in_section, probe, tensor};
use crate::backends::on_cubecl::DeviceFailure;
use crate::{MemoryOps, OptimizerOps, Session};

type Vector = Tensor<Wgpu, 1>;

fn adapter() -> Option<WgpuDevice> {
    let found = probe();
    assert!(found.is_ok() || std::env::var_os("CI").is_none(), "CI must have a Vulkan adapter: {found:?}");
    found.is_ok().then_some(WgpuDevice::DefaultDevice)
}

fn filled(count: usize, value: f32) -> Vector {
    Tensor::from_data(TensorData::new(vec![value; count], [count]), &WgpuDevice::DefaultDevice)
}

fn host(x: Vector) -> Vec<f32> {
    x.into_data().to_vec().expect("f32")
}

/// Adds by our kernel.
fn add(a: &Vector, b: &Vector) -> Vector {
    Wgpu::accumulate(a.clone(), b.clone())
}

#[test]
fn operations_of_burn_and_ours_alternate_without_waits() {
    let Some(_device) = adapter() else { return };
    let mut x = filled(1000, 0.0);
    for round in 0..200 {
        // Burn, ours, Burn in place, ours.
        let one = filled(1000, 1.0) * 3.0 - 2.0;
        x = add(&x, &one);
        x = x + 1.0;
        x = add(&x, &one) - 1.0;
        if round % 50 == 0 {
            assert_eq!(host(x.clone())[7], 2.0 * (round + 1) as f32);
        }
    }
    assert_eq!(host(x), vec![400.0; 1000]);
}

#[test]
fn a_pause_comes_after_the_work_before_it_and_before_the_work_after_it() {
    let Some(device) = adapter() else { return };
    let one = filled(64, 1.0);
    let total = Wgpu::section(&device, || {
        let mut x = add(&one, &one);
        for _ in 0..20 {
            let doubled = Wgpu::pause(&device, || x.clone() * 2.0);
            x = add(&doubled, &one);
        }
        x
    });
    let expected = (0..20).fold(2.0_f32, |x, _| 2.0 * x + 1.0);
    assert_eq!(host(total), vec![expected; 64]);
}

#[test]
fn memory_that_a_section_has_read_is_not_overwritten_before_it_is_submitted() {
    let Some(device) = adapter() else { return };
    let sums: Vec<_> = (0..20)
        .map(|round| {
            Wgpu::section(&device, || {
                let sum = add(&filled(4096, round as f32), &filled(4096, 1.0));
                // The operands are dropped; uploads of the same size come before the section is submitted.
                let _others: Vec<_> = (0..4).map(|_| filled(4096, -100.0)).collect();
                sum
            })
        })
        .collect();
    for (round, sum) in sums.into_iter().enumerate() {
        assert_eq!(host(sum), vec![round as f32 + 1.0; 4096]);
    }
}

#[test]
fn a_section_reads_what_another_thread_has_uploaded() {
    let Some(_device) = adapter() else { return };
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || (0..50).for_each(|round| sender.send(filled(512, round as f32)).expect("a receiver")));
    for round in 0..50 {
        let x = receiver.recv().expect("a sender") + 1.0;
        assert_eq!(host(add(&x, &filled(512, 1.0))), vec![round as f32 + 2.0; 512]);
    }
}

#[test]
fn views_are_read_at_their_offset_and_results_may_have_the_memory_of_operands() {
    let Some(device) = adapter() else { return };
    let values: Vec<f32> = (0..1000).map(|value| value as f32).collect();
    let x: Vector = Tensor::from_data(TensorData::new(values, [1000]), &device);
    let sum = add(&x.clone().narrow(0, 3, 50), &x.clone().narrow(0, 13, 50));
    assert_eq!(host(sum.clone())[..3], [16.0, 18.0, 20.0]);
    // This sum has no other owner.
    let again = Wgpu::accumulate(sum, x.narrow(0, 1, 50));
    assert_eq!(host(again)[..3], [17.0, 20.0, 23.0]);
}

#[test]
fn memory_is_used_again_and_returned() {
    let Some(_device) = adapter() else { return };
    let one = filled(1 << 16, 1.0);
    let mut x = add(&one, &one);
    for _ in 0..50 {
        x = add(&x, &one);
    }
    let held = super::super::allocated_bytes().expect("wgpu counts its memory");
    assert!(held < 20 << 18, "{held} bytes for 52 tensors of {} each", 1 << 18);
    drop((x, one));
    Engine::get().release();
    assert!(super::super::allocated_bytes().expect("wgpu counts its memory") < held);
    assert_eq!(host(add(&filled(8, 1.0), &filled(8, 2.0))), [3.0; 8]);
}

#[test]
fn memory_of_changing_sizes_does_not_add_up() {
    let Some(device) = adapter() else { return };
    let mib = 1 << 20;
    for size in (1..=20).map(|size| size * mib) {
        let one = Tensor::<Wgpu, 1>::ones([size / 4], &device);
        assert_eq!(host(add(&one, &one).narrow(0, size / 4 - 1, 1)), [2.0]);
    }
    let [kept, used] = Engine::get().recycled.bytes();
    assert!(kept <= 94 * mib && used == 0, "{kept} bytes for tensors of up to 20 MiB");
}

#[test]
fn a_wrong_program_is_an_error_with_the_name_of_its_operation() {
    let Some(_device) = adapter() else { return };
    let failure = DeviceFailure::catch(|| {
        in_section(|engine| {
            let template = "@binding(_) var<storage, read_write> y: array<f32>;\n@compute @workgroup_size(1) fn main() { y[0] = 1u; }";
            let y = engine.empty_matrix(1, 4);
            let kernel = Kernel { name: "a wrong one", template, constants: Vec::new() };
            engine.launch(&kernel, &[Operand::Write(&y)], &[], [1; 3], Cost::default());
            tensor::<2>(y.tensor)
        })
    });
    let failure = failure.expect_err("a program of wrong types");
    assert_eq!((failure.operation, failure.out_of_memory), ("a wrong one", false));
    assert_eq!(host(add(&filled(8, 1.0), &filled(8, 2.0))), [3.0; 8]);
}

/// A device is lost for all threads of a process, so this test starts itself in one of its own.
#[test]
fn a_lost_device_is_an_error() {
    const IS_CHILD: &str = "FIREBRICK_TEST_LOSES_ITS_DEVICE";
    let Some(_device) = adapter() else { return };
    if std::env::var_os(IS_CHILD).is_some() {
        return lose_the_device();
    }
    let mut child = std::process::Command::new(std::env::current_exe().expect("this program's path"));
    let child = child.args(["a_lost_device_is_an_error"]).env(IS_CHILD, "1").output().expect("this program starts");
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

fn lose_the_device() {
    DeviceFailure::quiet_hook();
    let [a, b] = [1.0, 2.0].map(|value| filled(8, value));
    assert_eq!(host(add(&a, &b)), [3.0; 8]);
    Engine::get().gpu.device.destroy();
    for _ in 0..2 {
        let failure = DeviceFailure::catch(|| host(add(&a, &b))).expect_err("the device is lost");
        assert!(failure.message.contains("lost") && !failure.out_of_memory, "{failure:?}");
    }
}

#[test]
fn a_tensor_that_is_too_large_is_an_error_and_later_work_goes_on() {
    let Some(_device) = adapter() else { return };
    DeviceFailure::quiet_hook();
    let failure = DeviceFailure::catch(|| {
        in_section(|engine| {
            let too_many = engine.most_values() + 1024;
            tensor::<2>(engine.empty_matrix(1, too_many).tensor)
        })
    });
    let failure = failure.expect_err("more than a binding");
    assert_eq!(failure.operation, "allocating a tensor", "{failure}");
    assert_eq!(host(add(&filled(8, 1.0), &filled(8, 2.0))), [3.0; 8]);
}

#[test]
fn the_self_test_finds_memory_that_no_kernel_has_written() {
    let Some(_device) = adapter() else { return };
    let engine = Engine::get();
    engine.fill_new_memory(true);
    let unwritten = engine.section(|| tensor::<2>(engine.empty_matrix(2, 3).tensor));
    engine.fill_new_memory(false);
    assert!(host(unwritten.reshape([6])).into_iter().all(f32::is_nan));
}

#[test]
fn bf16_values_are_uploaded_as_f32() {
    let Some(device) = adapter() else { return };
    let bytes: Vec<u8> = [0x3f80_u16, 0xc000, 0x7f00].into_iter().flat_map(u16::to_ne_bytes).collect();
    let mut buffer = Wgpu::host_buffer(&device, bytes.len());
    buffer.copy_from_slice(&bytes);
    let values = Wgpu::upload([Ok::<_, ()>(buffer)], [1, 3], DType::BF16, &device).expect("no buffer failed");
    assert_eq!(host(values.cast(DType::F32).reshape([3])), [1.0, -2.0, f32::from_bits(0x7f00_0000)]);
}
