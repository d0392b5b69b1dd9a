//! A training pass through the layers: what each saves in the forward, where that waits, and how its backward gets it.
//!
//! Under [`Recompute::Projections`] the two halves of a layer run backward one after the other, and each is fetched separately: the input of the MLP
//! arrives while the layer above runs backward, those of the mixer's half while its MLP does. So the two halves are never recomputed at the
//! same time, and offloaded tensors are on the device only while their half runs.

use burn_tensor::Tensor;
use firebrick_kernels::memory::prefetch::Store;
use firebrick_kernels::{GradientSink, Keep, Kernels, Offloaded, Payload, Recompute, SoftmaxStatistics};

use crate::division::{Blocks, LayerRef};
use crate::experts::router_loss::RouterSums;
use crate::layer::{Context, Layer, LowRank, MixerHalf, MlpHalf, SavedMlpHalf};
use crate::linear::{AdapterPass, DropoutMasks};
use crate::mixer::{Attend, Kept, Mixed, Published, SavedMixer};
use crate::tile::Passing;

/// Settings of a training pass through the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassOptions {
    /// The policy for what the forward pass saves of each layer.
    pub recompute: Recompute,
    /// Whether saved tensors wait for the backward in host memory. Needs a policy with [`Recompute::may_offload`], and a backend that can copy them
    /// there and back while other work runs.
    pub offload: bool,
    /// Whether LoRA pairs take part. Without them the model is its frozen base: the reference of a preference loss. Modules and rows that train
    /// whole always do.
    pub adapters: bool,
    /// The dropout masks. `None`: nothing is dropped.
    pub dropout: Option<DropoutMasks>,
}

impl PassOptions {
    pub(crate) fn adapter_pass(self) -> AdapterPass {
        AdapterPass { are_on: self.adapters, dropout: self.dropout }
    }
}

impl Default for PassOptions {
    fn default() -> Self {
        Self { recompute: Recompute::Full, offload: false, adapters: true, dropout: None }
    }
}

/// The tensors that the forward saved of one layer.
pub(crate) enum SavedLayer<B: Kernels> {
    /// Its input.
    Input { x_nd: Offloaded<B>, low_rank: LowRank<B> },
    /// Its input, and the states before its tiles.
    Tiles { x_nd: Offloaded<B>, starts: Vec<Passing<B>> },
    /// The inputs of its two halves.
    Halves { mixer: Box<MixerInputs<B>>, h_nd: Offloaded<B>, low_rank: LowRank<B> },
    /// All that its backward needs, except for what is cheap to compute.
    Activations(Box<SavedMixer<B>>, SavedMlpHalf<B>),
}

/// The tensors from which the mixer's half is recomputed.
pub(crate) struct MixerInputs<B: Kernels> {
    x_nd: Offloaded<B>,
    mixed_nm: Offloaded<B>,
    kept: Option<KeptInputs<B>>,
    /// The low-rank result of the output projection; it stays on the device too.
    low_rank: LowRank<B>,
}

/// What else of a mixer the backward reads, and where it waits.
enum KeptInputs<B: Kernels> {
    /// One value per head and token; they stay on the device.
    Statistics(SoftmaxStatistics<B>),
    /// As rows, and their shape.
    States(Offloaded<B>, [usize; 4]),
}

impl<B: Kernels> KeptInputs<B> {
    fn new(kept: Kept<B>, offload: bool) -> Self {
        match kept {
            Kept::Statistics(statistics) => Self::Statistics(statistics),
            Kept::States(states) => {
                let [chunks, heads, rows, width] = states.dims();
                let as_rows = states.reshape([chunks * heads * rows, width]);
                Self::States(put_away(as_rows, offload), [chunks, heads, rows, width])
            }
        }
    }

    fn restore(self, device: &B::Device) -> Kept<B> {
        match self {
            Self::Statistics(statistics) => Kept::Statistics(statistics),
            Self::States(states, shape) => Kept::States(states.restore(device).into_values().reshape(shape)),
        }
    }
}

impl<B: Kernels> MixerInputs<B> {
    fn prefetch(&mut self, device: &B::Device) {
        self.mixed_nm.prefetch(device);
        if let Some(KeptInputs::States(states, _)) = &mut self.kept {
            states.prefetch(device);
        }
        self.x_nd.prefetch(device);
    }

    fn restore(self, device: &B::Device) -> MixerHalf<B> {
        let values_nm = self.mixed_nm.restore(device).into_values();
        let mixed = Mixed { values_nm, kept: self.kept.map(|kept| kept.restore(device)) };
        MixerHalf::Inputs { x_nd: self.x_nd.restore(device).into_values(), mixed, low_rank: self.low_rank }
    }
}

fn put_away<B: Kernels>(x_nd: Tensor<B, 2>, offload: bool) -> Offloaded<B> {
    let x_nd = Payload::Values(x_nd);
    if offload { B::offload(x_nd) } else { Offloaded::on_device(x_nd) }
}

/// Returns a layer's output and its saved tensors, and adds the choices of a mixture to `sums`. The last layer runs backward next, so what its
/// backward needs first stays on the device.
pub(crate) fn forward_layer<B: Kernels>(
    layer: &Layer<B>,
    x_nd: Tensor<B, 2>,
    context: &Context<B>,
    published: &mut Published<B>,
    pass: PassOptions,
    is_last: bool,
    sums: Option<&mut RouterSums<B>>,
) -> (Tensor<B, 2>, SavedLayer<B>) {
    let adapters = pass.adapter_pass();
    let attend = || Attend::Documents(&context.documents);
    let keeping = |x_nd, keep, sums, published: &mut Published<B>| {
        let after = layer.forward_mixer(x_nd, &context.rotary, attend(), published, keep, adapters);
        let (y_nd, mlp) = layer.forward_mlp(after.h_nd.clone(), layer.own_input(published), keep, adapters, sums);
        let mlp = mlp.expect("a layer saves its activations under this policy");
        (y_nd, SavedLayer::Activations(after.into_saved(), mlp))
    };
    match pass.recompute {
        Recompute::Full if layer.runs_in_tiles(context, adapters) => {
            let (y_nd, starts) = layer.forward_tiles(&x_nd, context, adapters);
            (y_nd, SavedLayer::Tiles { x_nd: put_away(x_nd, pass.offload && !is_last), starts })
        }
        Recompute::Full => {
            let after =
                layer.forward_mixer(x_nd.clone(), &context.rotary, attend(), published, Keep::Nothing, adapters);
            let (h_nd, input_np) = (after.into_outputs().2, layer.own_input(published));
            let (y_nd, low_rank) = layer.forward_mlp_of_inputs(h_nd, input_np, context, adapters, sums);
            (y_nd, SavedLayer::Input { x_nd: put_away(x_nd, pass.offload && !is_last), low_rank })
        }
        Recompute::Projections => {
            let after =
                layer.forward_mixer(x_nd.clone(), &context.rotary, attend(), published, Keep::LowRank, adapters);
            let (mixed, low_rank, h_nd) = after.into_outputs();
            let mixer = Box::new(MixerInputs {
                x_nd: put_away(x_nd, pass.offload),
                mixed_nm: put_away(mixed.values_nm, pass.offload),
                kept: mixed.kept.map(|kept| KeptInputs::new(kept, pass.offload)),
                low_rank,
            });
            let input_np = layer.own_input(published);
            let (y_nd, low_rank) = layer.forward_mlp_of_inputs(h_nd.clone(), input_np, context, adapters, sums);
            (y_nd, SavedLayer::Halves { mixer, h_nd: put_away(h_nd, pass.offload && !is_last), low_rank })
        }
        Recompute::Selective => keeping(x_nd, Keep::Inputs, sums, published),
        Recompute::None => keeping(x_nd, Keep::Everything, sums, published),
    }
}

/// The inputs of a layer's backward. Tensors are on the device, or on their way to it.
pub(crate) enum Restored<B: Kernels> {
    Input { x_nd: Tensor<B, 2>, low_rank: LowRank<B> },
    Tiles { x_nd: Tensor<B, 2>, starts: Vec<Passing<B>> },
    Halves { mixer: Box<MixerInputs<B>>, h_nd: Tensor<B, 2>, low_rank: LowRank<B> },
    Activations(Box<SavedMixer<B>>, SavedMlpHalf<B>),
}

pub(crate) fn backward_layer<B: Kernels>(
    layer: &Layer<B>,
    saved: Restored<B>,
    context: &Context<B>,
    published: &mut Published<B>,
    dy_nd: Tensor<B, 2>,
    adapters: AdapterPass,
    sink: &mut dyn GradientSink<B>,
) -> Tensor<B, 2> {
    let (mixer, mlp) = match saved {
        Restored::Tiles { x_nd, starts } => {
            return layer.backward_tiles(&x_nd, starts, context, &dy_nd, adapters, sink);
        }
        Restored::Input { x_nd, low_rank } => {
            let attend = Attend::Documents(&context.documents);
            let after = layer.forward_mixer(x_nd, &context.rotary, attend, published, Keep::Inputs, adapters);
            let h_nd = after.h_nd.clone();
            (MixerHalf::Activations(after.into_saved()), MlpHalf::Input { h_nd, low_rank })
        }
        Restored::Activations(mixer, mlp) => (MixerHalf::Activations(mixer), MlpHalf::Activations(mlp)),
        Restored::Halves { mixer, h_nd, low_rank } => {
            let half = MlpHalf::Input { h_nd, low_rank };
            let dh_nd = layer.backward_mlp(half, context, published, dy_nd, adapters, sink);
            let mixer = mixer.restore(&dh_nd.device());
            return layer.backward_mixer(mixer, context, published, dh_nd, adapters, sink);
        }
    };
    let dh_nd = layer.backward_mlp(mlp, context, published, dy_nd, adapters, sink);
    layer.backward_mixer(mixer, context, published, dh_nd, adapters, sink)
}

/// The items that the backward fetches ahead: the layers, and their saved tensors.
pub(crate) struct BackwardItems<'a, B: Kernels> {
    pub(crate) blocks: Blocks<'a, B>,
    pub(crate) saved: Vec<Option<SavedLayer<B>>>,
}

impl<'a, B: Kernels> Store for BackwardItems<'a, B> {
    type Item = (LayerRef<'a, B>, Restored<B>);

    fn prefetch(&mut self, index: usize) {
        self.blocks.prefetch(index);
        match &mut self.saved[index] {
            Some(
                SavedLayer::Input { x_nd, .. } | SavedLayer::Tiles { x_nd, .. } | SavedLayer::Halves { h_nd: x_nd, .. },
            ) => {
                x_nd.prefetch(self.blocks.device);
            }
            Some(SavedLayer::Activations(..)) | None => (),
        }
    }

    fn take(&mut self, index: usize) -> Self::Item {
        let device = self.blocks.device;
        let saved = match self.saved[index].take().expect("what a layer saved is taken once") {
            SavedLayer::Input { x_nd, low_rank } => {
                Restored::Input { x_nd: x_nd.restore(device).into_values(), low_rank }
            }
            SavedLayer::Tiles { x_nd, starts } => Restored::Tiles { x_nd: x_nd.restore(device).into_values(), starts },
            SavedLayer::Halves { mut mixer, h_nd, low_rank } => {
                let h_nd = h_nd.restore(device).into_values();
                mixer.prefetch(device);
                Restored::Halves { mixer, h_nd, low_rank }
            }
            SavedLayer::Activations(mixer, mlp) => Restored::Activations(mixer, mlp),
        };
        (self.blocks.take(index), saved)
    }

    /// Drops the item: a backward returns nothing.
    fn put(&mut self, _index: usize, _item: Self::Item) {}
}
