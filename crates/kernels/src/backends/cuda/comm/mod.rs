//! Collectives on CUDA: by NCCL once the ranks are connected, on a side stream (`collectives.rs`), so that buckets of gradients are summed
//! while the backward goes on. Ranks that are not connected, such as threads of a test, take the reference bodies in a pause of the
//! running section; a pause releases the device, so that another rank in the same process can finish what this one waits for.
//!
//! A thread watches: once NCCL reports an error, or the job has lost a rank, it aborts the communicator, so that kernels which wait for
//! that rank end. What they leave behind is no result, which `Communicator::check` tells.
//! Trade-off: NCCL adds in its own order: the same bits on every rank, but not those of a sum in rank order.

pub(super) mod collectives;

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use burn_tensor::{DType, Tensor, TensorMetadata};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::{CudaError, DevicePointer, Nccl, NcclCommunicator, NcclId, Stream};

use crate::backends::cuda::engine::{
    Cost, Cuda, DeviceBlock, Engine, MatrixView, Primitive, device_count, engine, float, int_tensor, tensor, view,
};
use crate::comm::{DeviceSide, reference};
use crate::{COLLECTIVE, CommError, CommOps, Communicator, Exchange, Loan, Payload, PayloadLayout, Readback};

/// Time between two looks at NCCL's errors.
const WATCH: Duration = Duration::from_millis(500);

/// NCCL's side of the ranks.
struct Connected {
    nccl: NcclCommunicator,
    failure: Mutex<Option<String>>,
}

impl Connected {
    /// Notes why the devices are not connected any more, and ends what waits for other ranks.
    fn end(&self, problem: &str) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| problem.to_owned());
        self.nccl.abort();
    }
}

impl DeviceSide for Connected {
    fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Looks for errors of NCCL until the ranks are disconnected.
fn watch(connected: &Weak<Connected>) {
    loop {
        thread::sleep(WATCH);
        let Some(connected) = connected.upgrade() else { return };
        if let Some(error) = connected.nccl.failure() {
            connected.end(&error.to_string());
            return;
        }
    }
}

/// Connects this rank, on the engine's device.
fn connect(ranks: &Communicator, engine: &Engine) -> Result<String, CommError> {
    let refused = |error: CudaError| CommError::NoLibrary { rank: ranks.rank(), problem: error.to_string() };
    let nccl = Nccl::load().map_err(refused)?;
    let (major, minor, patch) = nccl.version().map_err(refused)?;
    let own = if ranks.rank() == 0 { nccl.new_id().map_err(refused)?.0.to_vec() } else { Vec::new() };
    let (operation, expected) = ("connecting devices", NcclId::BYTES);
    let gathered = ranks.all_gather_bytes(operation, own)?;
    let mismatch = |_| CommError::Mismatch { rank: 0, operation, expected, got: gathered[0].len() };
    let id = NcclId(gathered[0][..].try_into().map_err(mismatch)?);
    let nccl = nccl.connect(engine.context(), &id, ranks.rank(), ranks.world_size()).map_err(refused)?;
    let connected = Arc::new(Connected { nccl, failure: Mutex::default() });
    let (watched, aborted) = (Arc::downgrade(&connected), Arc::downgrade(&connected));
    let thread = thread::Builder::new().name("nccl-watch".to_owned()).spawn(move || watch(&watched));
    let no_thread = |error: std::io::Error| CommError::NoLibrary { rank: ranks.rank(), problem: error.to_string() };
    thread.map_err(no_thread)?;
    ranks.when_lost(move |problem| {
        if let Some(connected) = aborted.upgrade() {
            connected.end(problem);
        }
    });
    ranks.connect_device(connected);
    Ok(format!("NCCL {major}.{minor}.{patch}"))
}

/// What an operation on the other devices returned.
fn checked<T>(ranks: &Communicator, operation: &'static str, result: Result<T, CudaError>) -> Result<T, CommError> {
    result.map_err(|error| {
        let failure = ranks.device_side::<Connected>().and_then(|connected| connected.failure());
        ranks.lost(operation, failure.unwrap_or_else(|| error.to_string()))
    })
}

/// Submits an operation between devices; see `collectives.rs`.
fn on_side_stream(
    engine: &Engine,
    held: Vec<Primitive>,
    operation: impl FnOnce(&Stream) -> Result<(), CudaError>,
) -> Result<u64, CudaError> {
    assert!(engine.is_in_section(), "an operation between devices is ordered by the section that it is in");
    let bytes: usize = held.iter().map(|tensor| tensor.shape().num_elements() * tensor.dtype.size()).sum();
    let submitted = engine.collectives.submit(engine.stream(), held, operation);
    if let Some((start, end)) = engine.collectives.last_run() {
        engine.trace.record(COLLECTIVE, Cost { bytes: bytes as f64, ..Cost::default() }, [start, end]);
    }
    submitted
}

fn pointer(block: DeviceBlock) -> DevicePointer<f32> {
    assert!(block.is_dense() && block.dtype == DType::F32, "ranks exchange dense f32");
    DevicePointer::from_address(block.address)
}

/// The bytes of a dense matrix.
fn bytes_of(matrix: &MatrixView) -> DevicePointer<u8> {
    assert!(matrix.is_dense(), "ranks exchange matrices without gaps");
    DevicePointer::from_address(matrix.address)
}

/// A matrix that may be written in place.
fn owned(engine: &Engine, values: Tensor<Cuda, 1>) -> MatrixView {
    engine.view_of(engine.owned(float(values)))
}

/// The first `length` values of a flat matrix, as a tensor that shares its memory.
fn first(matrix: &MatrixView, length: usize) -> Tensor<Cuda, 1> {
    tensor(view(matrix, 0, &[length], vec![1]))
}

impl CommOps for Cuda {
    /// Its number among the devices that this process sees. A launcher that shows each rank only its own device (SLURM's
    /// `--gpus-per-task`) makes that number 0.
    fn device_of(local_rank: usize) -> CudaDevice {
        CudaDevice::new(if device_count() == 1 { 0 } else { local_rank })
    }

    fn connect(ranks: &Communicator, device: &CudaDevice) -> Result<String, CommError> {
        match std::env::var("FIREBRICK_COLLECTIVES").as_deref() {
            Ok("host") => Ok("host memory and TCP, as FIREBRICK_COLLECTIVES says".to_owned()),
            _ => connect(ranks, &engine(device)),
        }
    }

    fn is_exact_after_loss(ranks: &Communicator) -> bool {
        ranks.device_side::<Connected>().is_none()
    }

    fn comm_wait(device: &CudaDevice) -> Option<Readback> {
        Some(Readback::new(engine(device).collectives.take_waits()))
    }

    fn comm_time(device: &CudaDevice) -> Option<Readback> {
        Some(Readback::new(engine(device).collectives.take_runs()))
    }

    fn all_reduce_sum(ranks: &Communicator, tensors: Vec<Tensor<Self, 1>>) -> Result<Vec<Tensor<Self, 1>>, CommError> {
        let Some(device) = tensors.first().map(Tensor::device).filter(|_| ranks.world_size() > 1) else {
            return Ok(tensors);
        };
        let engine = engine(&device);
        let Some(connected) = ranks.device_side::<Connected>() else {
            return engine.pause(|| reference::all_reduce_sum(ranks, tensors));
        };
        engine.section(|| {
            let matrices: Vec<MatrixView> = tensors.into_iter().map(|values| owned(&engine, values)).collect();
            let buffers: Vec<_> = matrices.iter().map(|matrix| (pointer(matrix.block()), matrix.count())).collect();
            let held = matrices.iter().map(|matrix| matrix.tensor.clone()).collect();
            // SAFETY: the buffers are those of the tensors, which are held until the work is done; no operation of the section touches
            // them; every rank sums the same tensors in the same order.
            let submitted =
                on_side_stream(&engine, held, |side| unsafe { connected.nccl.all_reduce_sum(side, &buffers) });
            checked(ranks, "all_reduce_sum", submitted)?;
            Ok(matrices.into_iter().map(|matrix| tensor(matrix.tensor)).collect())
        })
    }

    fn reduce_scatter_sum(ranks: &Communicator, values: Tensor<Self, 1>) -> Result<Tensor<Self, 1>, CommError> {
        let engine = engine(&values.device());
        let Some(connected) = ranks.device_side::<Connected>() else {
            return engine.pause(|| reference::reduce_scatter_sum(ranks, values));
        };
        engine.section(|| {
            let ([length], count) = (values.dims(), ranks.world_size());
            let part = length.div_ceil(count);
            let whole = padded(&engine, engine.flat(values), part * count);
            let sum = engine.empty_matrix(1, part, DType::F32);
            let (from, to) = (pointer(whole.block()), pointer(sum.block()));
            let held = vec![whole.tensor.clone(), sum.tensor.clone()];
            let submitted = on_side_stream(&engine, held, |side| {
                // SAFETY: `whole` has one part for each rank and `sum` has one; both are held until the work is done.
                unsafe { connected.nccl.reduce_scatter_sum(side, from, to, part) }
            });
            checked(ranks, "reduce_scatter_sum", submitted)?;
            Ok(first(&sum, length.saturating_sub(ranks.rank() * part).min(part)))
        })
    }

    fn all_gather(ranks: &Communicator, values: Tensor<Self, 1>) -> Result<Tensor<Self, 1>, CommError> {
        let engine = engine(&values.device());
        let Some(connected) = ranks.device_side::<Connected>() else {
            return engine.pause(|| reference::all_gather(ranks, values));
        };
        let lengths = lengths(ranks, values.dims()[0])?;
        engine.section(|| {
            let part = lengths.iter().copied().max().unwrap_or(0);
            let own = padded(&engine, engine.flat(values), part);
            let all = engine.empty_matrix(1, part * ranks.world_size(), DType::F32);
            let (from, to) = (pointer(own.block()), pointer(all.block()));
            let held = vec![own.tensor.clone(), all.tensor.clone()];
            let submitted = on_side_stream(&engine, held, |side| {
                // SAFETY: `own` is one part and `all` has one for each rank; both are held until the work is done.
                unsafe { connected.nccl.all_gather(side, from, to, part) }
            });
            checked(ranks, "all_gather", submitted)?;
            Ok(first(&all, lengths.iter().sum()))
        })
    }

    fn broadcast_each(
        ranks: &Communicator,
        tensors: Vec<(Tensor<Self, 1>, usize)>,
    ) -> Result<Vec<Tensor<Self, 1>>, CommError> {
        let Some(device) = tensors.first().map(|(tensor, _)| tensor.device()) else { return Ok(Vec::new()) };
        let engine = engine(&device);
        let Some(connected) = ranks.device_side::<Connected>() else {
            return engine.pause(|| reference::broadcast_each(ranks, tensors));
        };
        engine.section(|| {
            let matrices: Vec<(MatrixView, usize)> =
                tensors.into_iter().map(|(values, root)| (owned(&engine, values), root)).collect();
            let of = |(matrix, root): &(MatrixView, usize)| (bytes_of(matrix), matrix.bytes(), *root);
            let buffers: Vec<_> = matrices.iter().map(of).collect();
            let held = matrices.iter().map(|(matrix, _)| matrix.tensor.clone()).collect();
            // SAFETY: the buffers are those of the tensors, which are held until the work is done; no operation of the section touches
            // them; every rank names the same roots in the same order.
            let submitted = on_side_stream(&engine, held, |side| unsafe { connected.nccl.broadcast(side, &buffers) });
            checked(ranks, "broadcast_each", submitted)?;
            Ok(matrices.into_iter().map(|(matrix, _)| tensor(matrix.tensor)).collect())
        })
    }

    fn start_broadcast(
        ranks: &Communicator,
        loans: Vec<Loan<Self>>,
        device: &CudaDevice,
    ) -> Result<Exchange<Self>, CommError> {
        let engine = engine(device);
        let Some(connected) = ranks.device_side::<Connected>() else {
            return engine.pause(|| Ok(Exchange::done(reference::broadcast_payloads(ranks, loans, device)?)));
        };
        engine.section(|| {
            let own = |payload: Payload<Self>| match payload {
                Payload::Values(values) => engine.dense(engine.view_of(float(values))),
                Payload::Codes(codes) => engine.dense(engine.view_of(codes.into_primitive())),
            };
            let new = |layout: PayloadLayout| engine.view_of(engine.empty([layout.elements], layout.dtype));
            let here = |loan: Loan<Self>| {
                let matrix = loan.own.map_or_else(|| new(loan.layout), own);
                (matrix, loan.root, loan.layout.is_codes)
            };
            let matrices: Vec<(MatrixView, usize, bool)> = loans.into_iter().map(here).collect();
            let of = |(matrix, root, _): &(MatrixView, usize, bool)| (bytes_of(matrix), matrix.bytes(), *root);
            let buffers: Vec<_> = matrices.iter().map(of).collect();
            let held = matrices.iter().map(|(matrix, ..)| matrix.tensor.clone()).collect();
            // SAFETY: the buffers are those of the tensors, which are held until the work is done. A root only reads its own, as the
            // section may; what others receive is new, and no operation reads it before the ticket is redeemed. Every rank names the same
            // roots in the same order.
            let submitted = on_side_stream(&engine, held, |side| unsafe { connected.nccl.broadcast(side, &buffers) });
            let ticket = checked(ranks, "start_broadcast", submitted)?;
            let payload = |(matrix, _, is_codes): (MatrixView, usize, bool)| match is_codes {
                true => Payload::Codes(int_tensor(matrix.tensor)),
                false => Payload::Values(tensor(matrix.tensor)),
            };
            Ok(Exchange { payloads: matrices.into_iter().map(payload).collect(), ticket: Some(ticket) })
        })
    }

    fn start_reduce(ranks: &Communicator, tensors: Vec<(Tensor<Self, 1>, usize)>) -> Result<Exchange<Self>, CommError> {
        let done = |sums: Vec<Tensor<Self, 1>>| Exchange::done(sums.into_iter().map(Payload::Values).collect());
        let Some(device) = tensors.first().map(|(tensor, _)| tensor.device()) else { return Ok(done(Vec::new())) };
        let engine = engine(&device);
        let Some(connected) = ranks.device_side::<Connected>() else {
            return engine.pause(|| reference::reduce_each(ranks, tensors).map(done));
        };
        engine.section(|| {
            let matrices: Vec<(MatrixView, usize)> =
                tensors.into_iter().map(|(values, root)| (owned(&engine, values), root)).collect();
            let of = |(matrix, root): &(MatrixView, usize)| (pointer(matrix.block()), matrix.count(), *root);
            let buffers: Vec<_> = matrices.iter().map(of).collect();
            let held = matrices.iter().map(|(matrix, _)| matrix.tensor.clone()).collect();
            // SAFETY: the buffers are those of the tensors, which are held until the work is done; no operation of the section touches
            // them before the ticket is redeemed; every rank names the same roots in the same order.
            let submitted = on_side_stream(&engine, held, |side| unsafe { connected.nccl.reduce_sum(side, &buffers) });
            let ticket = checked(ranks, "start_reduce", submitted)?;
            let payloads = matrices.into_iter().map(|(matrix, _)| Payload::Values(tensor(matrix.tensor))).collect();
            Ok(Exchange { payloads, ticket: Some(ticket) })
        })
    }

    fn finish(exchange: Exchange<Self>, device: &CudaDevice) -> Vec<Payload<Self>> {
        let Exchange { payloads, ticket } = exchange;
        if let Some(ticket) = ticket {
            let engine = engine(device);
            engine.collectives.redeem(ticket, engine.stream());
        }
        payloads
    }

    fn broadcast(ranks: &Communicator, values: Tensor<Self, 1>, root: usize) -> Result<Tensor<Self, 1>, CommError> {
        let shared = Self::broadcast_each(ranks, vec![(values, root)])?;
        Ok(shared.into_iter().next().expect("one tensor was shared"))
    }
}

/// A flat matrix with zeros after its values, up to `length` of them.
fn padded(engine: &Engine, values: MatrixView, length: usize) -> MatrixView {
    let values_block = DeviceBlock::dense(values.address, [1, values.count()], values.dtype);
    if values.count() == length {
        return MatrixView { block: values_block, tensor: values.tensor };
    }
    let whole = engine.empty_matrix(1, length, DType::F32);
    engine.fill(whole.block(), 0.0);
    if values.count() > 0 {
        engine.copy_rows(values_block, whole.block().columns(0, values.count()));
    }
    whole
}

/// The number of values of each rank. NCCL joins equal parts, so all but the last that has any must be equal.
fn lengths(ranks: &Communicator, own: usize) -> Result<Vec<usize>, CommError> {
    let operation = "the lengths of all_gather";
    let gathered = ranks.all_gather_bytes(operation, (own as u64).to_le_bytes().to_vec())?;
    let read = |(rank, bytes): (usize, &Arc<[u8]>)| {
        let mismatch = |_| CommError::Mismatch { rank, operation, expected: 8, got: bytes.len() };
        bytes[..].try_into().map(u64::from_le_bytes).map(|length| length as usize).map_err(mismatch)
    };
    let lengths: Vec<usize> = gathered.iter().enumerate().map(read).collect::<Result<_, _>>()?;
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let last = lengths.iter().rposition(|&length| length > 0).unwrap_or(0);
    match lengths[..last].iter().position(|&length| length != longest) {
        Some(rank) => Err(CommError::Mismatch { rank, operation, expected: 4 * longest, got: 4 * lengths[rank] }),
        None => Ok(lengths),
    }
}
