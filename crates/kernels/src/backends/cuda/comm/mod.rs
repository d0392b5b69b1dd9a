//! Collectives on CUDA: by NCCL once the ranks are connected, on a side stream (`collectives.rs`), so that buckets of gradients are summed while the
//! backward continues. Ranks that are not connected, such as threads of a test, use the reference bodies while the section is paused; a pause
//! releases the device, so that another rank in the same process can finish the work that this one waits for.
//!
//! A watcher thread aborts the communicator once NCCL reports an error, or the job has lost a rank, so that kernels
//! waiting for that rank end. Their results are invalid, which `Communicator::check` reports.
//! Trade-off: NCCL adds in its own order, which gives the same bits on every rank, but not those of a sum in rank order.

pub(super) mod collectives;

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use burn_tensor::{DType, TensorMetadata};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::{CudaError, Nccl, NcclCommunicator, NcclId, Stream};

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{Cost, Cuda, DeviceBlock, MatrixView, Primitive, payload, primitive};
use crate::comm::{Collective, DeviceSide};
use crate::{COLLECTIVE, CommError, Communicator, Exchange, Loan};

/// Interval between checks for NCCL errors.
const WATCH: Duration = Duration::from_millis(500);

struct Connected {
    nccl: NcclCommunicator,
    failure: Mutex<Option<String>>,
}

impl Connected {
    /// Records why the devices are no longer connected, and ends all waits for other ranks.
    fn end(&self, problem: &str) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| problem.to_owned());
        self.nccl.abort();
    }
}

/// Checks for NCCL errors until the ranks are disconnected.
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

/// Connects the devices of all ranks, unless `FIREBRICK_COLLECTIVES` disables it. Returns a description of the transport between them.
pub(in crate::backends) fn connect(ranks: &Communicator, device: &CudaDevice) -> Result<String, CommError> {
    if std::env::var("FIREBRICK_COLLECTIVES").as_deref() == Ok("host") {
        return Ok("host memory and TCP, as FIREBRICK_COLLECTIVES says".to_owned());
    }
    let device = Device::of(device);
    let refused = |error: CudaError| CommError::NoLibrary { rank: ranks.rank(), problem: error.to_string() };
    let nccl = Nccl::load().map_err(refused)?;
    let (major, minor, patch) = nccl.version().map_err(refused)?;
    let own = if ranks.rank() == 0 { nccl.new_id().map_err(refused)?.0.to_vec() } else { Vec::new() };
    let (operation, expected) = ("connecting devices", NcclId::BYTES);
    let gathered = ranks.all_gather_bytes(operation, own)?;
    let mismatch = |_| CommError::Mismatch { rank: 0, operation, expected, got: gathered[0].len() };
    let id = NcclId(gathered[0][..].try_into().map_err(mismatch)?);
    let nccl = nccl.connect(&device.context, &id, ranks.rank(), ranks.world_size()).map_err(refused)?;
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
    ranks.connect_device::<Cuda>(connected);
    Ok(format!("NCCL {major}.{minor}.{patch}"))
}

/// Returns the address of values that ranks sum, and whether they are bf16.
fn summed(block: DeviceBlock) -> (u64, bool) {
    let is_known = [DType::F32, DType::BF16].contains(&block.dtype);
    assert!(block.is_dense() && is_known, "ranks sum dense f32 or bf16, not {:?}", block.dtype);
    (block.address, block.dtype == DType::BF16)
}

fn address_of_bytes(matrix: &MatrixView) -> u64 {
    assert!(matrix.is_dense(), "ranks exchange matrices without gaps");
    matrix.address
}

impl DeviceSide<Cuda> for Connected {
    fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn start(
        &self,
        ranks: &Communicator,
        collective: Collective,
        tensors: Vec<Loan<Cuda>>,
        device: &CudaDevice,
    ) -> Result<Exchange<Cuda>, CommError> {
        in_section(device, |device| {
            let parts: Vec<Part> = tensors.into_iter().map(|loan| Part::new(device, collective, loan)).collect();
            let held: Vec<Primitive> = parts.iter().map(|part| part.matrix.tensor.clone()).collect();
            let bytes: usize = held.iter().map(|tensor| tensor.shape().num_elements() * tensor.dtype.size()).sum();
            let submitted = device.collectives.submit(device.stream(), held, |side| {
                // SAFETY: the buffers are those of the tensors, which are held until the work is done. No operation of
                // the section touches them before its end or the exchange's, except for reading what is lent, which its
                // root only reads too; what others receive is new. Every rank lists the same tensors and roots in the
                // same order.
                unsafe { self.submit(side, collective, &parts) }
            });
            if let Some((start, end)) = device.collectives.last_run() {
                device.trace.record(COLLECTIVE, Cost { bytes: bytes as f64, ..Cost::default() }, [start, end]);
            }
            let ticket = submitted
                .map_err(|error| ranks.lost(collective.name(), self.failure().unwrap_or_else(|| error.to_string())))?;
            let of = device.device().clone();
            let wait = Box::new(move || redeem(&of, ticket));
            let payloads = parts.into_iter().map(|part| payload(part.matrix.tensor, part.is_codes)).collect();
            Ok(Exchange { payloads, wait: Some(wait) })
        })
    }
}

/// Makes the engine's stream wait for an operation.
fn redeem(device: &CudaDevice, ticket: u64) {
    let device = Device::of(device);
    device.collectives.redeem(ticket, device.stream());
}

struct Part {
    matrix: MatrixView,
    root: usize,
    is_codes: bool,
}

impl Part {
    /// Allocates or takes the memory that the exchange uses; it writes all of it except what a root lends.
    fn new(device: &Device, collective: Collective, Loan { root, layout, own }: Loan<Cuda>) -> Self {
        let matrix = match (own.map(|own| primitive(own).0), collective) {
            (None, _) => device.view_of(device.empty([layout.elements], layout.dtype)),
            (Some(own), Collective::Lend) => device.dense(device.view_of(own)),
            (Some(own), _) => device.view_of(device.owned(own)),
        };
        Self { matrix, root, is_codes: layout.is_codes }
    }
}

impl Connected {
    /// Submits an operation on all parts as one group.
    ///
    /// # Safety
    /// The requirements of [`NcclCommunicator::all_reduce_sum`] must hold.
    unsafe fn submit(&self, side: &Stream, collective: Collective, parts: &[Part]) -> Result<(), CudaError> {
        let floats = |part: &Part| {
            let (address, is_bf16) = summed(part.matrix.block);
            (address, part.matrix.count(), is_bf16)
        };
        // SAFETY: the caller's promise, for each of them.
        unsafe {
            match collective {
                Collective::AllReduce => self.nccl.all_reduce_sum(side, &parts.iter().map(floats).collect::<Vec<_>>()),
                Collective::Reduce => {
                    let rooted = |part: &Part| {
                        let (address, count, is_bf16) = floats(part);
                        (address, count, is_bf16, part.root)
                    };
                    self.nccl.reduce_sum(side, &parts.iter().map(rooted).collect::<Vec<_>>())
                }
                Collective::Broadcast | Collective::Lend => {
                    let bytes = |part: &Part| (address_of_bytes(&part.matrix), part.matrix.bytes(), part.root);
                    self.nccl.broadcast(side, &parts.iter().map(bytes).collect::<Vec<_>>())
                }
            }
        }
    }
}
