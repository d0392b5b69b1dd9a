//! The gated delta rule on CUDA. Kernels: `chunks.cu`, `forward.cu`, `backward.cu`, `inputs_backward.cu`, over `tiles.cu`.
//!
//! Forward: what chunks need before their states are known, a scan over the chunks of each document, the outputs. Backward: the first again, a scan
//! from the end, gradients of pairs of tokens, gradients of the inputs. Only states at the starts of chunks are kept in between, in the compute format
//! with the columns of values first.
//! Trade-off: heads that are no multiple of 16 wide or wider than 128, cards whose blocks have too little shared memory, and generation from a state
//! take the reference body.

use burn_tensor::{DType, Tensor};
use firebrick_arch::DeltaNetSpec;
use firebrick_cuda::{Arguments, LaunchShape};

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeltaPart, DeltaSizes, DeviceBlock, MatrixView, Source, arguments, grid, tensor, view,
};
use crate::delta::{CHUNK, chunk_room, has_cuda_kernels, reference};
use crate::{DeltaGradients, DeltaInputs, DeltaOps, DeltaOutput, DeltaParameters, Documents, Session};

impl DeltaOps for Cuda {
    fn gated_delta(
        inputs: &DeltaInputs<Self>,
        parameters: &DeltaParameters<Self>,
        spec: &DeltaNetSpec,
        documents: &Documents<Self>,
        start: Option<Tensor<Self, 3>>,
    ) -> DeltaOutput<Self> {
        let device = inputs.qkv.device();
        let Some(sizes) = in_section(&device, |device| device.delta_sizes(spec, inputs.qkv.dtype())) else {
            return Self::pause(&device, || reference::forward(inputs, parameters, spec, documents, start));
        };
        in_section(&device, |device| {
            let rule = &device.delta_rule(inputs.clone(), parameters, spec, sizes, documents);
            let (states, v) = (device.empty_states(rule), rule.values_of(&rule.qkv));
            let start = start.map(|start| device.flat_as(start, DType::F32));
            let end = documents.goes_on.then(|| device.empty_state(rule));
            let arguments = arguments! {
                states: rows(&states), corrections: rows(&rule.corrections), k_hat: rows(&rule.k_hat),
                gates: rows(&rule.gates), inverse: rows(&rule.inverse), v: rows(&v), v_stride: long(v.stride),
                start: address(or_null(start.as_ref())), end: address(or_null(end.as_ref())), chunks: rows(&rule.chunks),
                documents: rows(&rule.documents),
            };
            device.delta_launch(rule, DeltaPart::Forward, "delta_scan", scan_blocks(rule), &rule.counts(arguments));
            let o = device.empty_matrix(rule.tokens(), rule.value_size(), rule.qkv.dtype);
            let arguments = arguments! {
                o: rows(&o), q_hat: rows(&rule.q_hat), gates: rows(&rule.gates), scores: rows(&rule.scores),
                states: rows(&states), corrections: rows(&rule.corrections), chunks: rows(&rule.chunks),
            };
            let blocks = [slices(rule) * rule.value_heads * rule.chunk_count, 128];
            device.delta_launch(rule, DeltaPart::Forward, "delta_output", blocks, &rule.counts(arguments));
            let end = end.map(|end| tensor(end.tensor));
            DeltaOutput { o: tensor(o.tensor), states: tensor(states.tensor), end }
        })
    }

    fn gated_delta_backward(
        inputs: DeltaInputs<Self>,
        parameters: &DeltaParameters<Self>,
        spec: &DeltaNetSpec,
        states: Tensor<Self, 4>,
        d_o: Tensor<Self, 2>,
        d_end: Option<Tensor<Self, 3>>,
        documents: &Documents<Self>,
        parameters_train: bool,
    ) -> DeltaGradients<Self> {
        let device = d_o.device();
        let Some(sizes) = in_section(&device, |device| device.delta_sizes(spec, inputs.qkv.dtype())) else {
            return Self::pause(&device, || {
                reference::backward(inputs, parameters, spec, states, d_o, d_end, documents, parameters_train)
            });
        };
        in_section(&device, |device| {
            let rule = &device.delta_rule(inputs, parameters, spec, sizes, documents);
            let (states, d_o) = (device.flat(states), device.flat(d_o));
            let d_end = d_end.map(|d_end| device.flat_as(d_end, DType::F32));
            let d_start = documents.begins_before.then(|| device.empty_state(rule));
            let (tokens, heads, dtype) = (rule.tokens(), rule.value_heads, rule.qkv.dtype);
            let d_states = device.empty_states(rule);
            let d_qkv = device.empty_matrix(tokens, rule.qkv.width, dtype);
            let [da, db] = [(); 2].map(|()| device.empty_matrix(tokens, heads, dtype));
            let value_dots = device.empty_matrix(heads, tokens, DType::F32);
            let (v, dv) = (rule.values_of(&rule.qkv), rule.values_of(&d_qkv));
            let arguments = arguments! {
                d_states: rows(&d_states), dv: rows(&dv), dv_stride: long(dv.stride), q_hat: rows(&rule.q_hat),
                k_hat: rows(&rule.k_hat), gates: rows(&rule.gates), inverse: rows(&rule.inverse),
                scores: rows(&rule.scores), d_o: rows(&d_o), d_o_stride: long(d_o.stride), d_start: address(or_null(d_start.as_ref())),
                d_end: address(or_null(d_end.as_ref())), chunks: rows(&rule.chunks), documents: rows(&rule.documents),
            };
            let blocks = scan_blocks(rule);
            device.delta_launch(rule, DeltaPart::Backward, "delta_scan_backward", blocks, &rule.counts(arguments));
            let arguments = arguments! {
                corrections: rows(&rule.corrections), scores: rows(&rule.scores), inverse: rows(&rule.inverse),
                value_dots: rows(&value_dots), k_hat: rows(&rule.k_hat), gates: rows(&rule.gates), states: rows(&states),
                v: rows(&v), v_stride: long(v.stride), dv: rows(&dv), dv_stride: long(dv.stride), d_o: rows(&d_o),
                d_o_stride: long(d_o.stride), chunks: rows(&rule.chunks),
            };
            let blocks = [heads * rule.chunk_count, 128];
            device.delta_launch(rule, DeltaPart::Backward, "delta_pairs_backward", blocks, &rule.counts(arguments));
            let partial = device.empty_matrix(rule.chunk_room, 2 * heads, DType::F32);
            let arguments = arguments! {
                d_qkv: rows(&d_qkv), d_qkv_stride: long(d_qkv.stride), da: rows(&da), da_stride: long(da.stride),
                db: rows(&db), db_stride: long(db.stride), partial: rows(&partial), q_hat: rows(&rule.q_hat),
                k_hat: rows(&rule.k_hat), inverse_lengths: rows(&rule.inverse_lengths), gates: rows(&rule.gates),
                of_scores: rows(&rule.scores), of_inverse: rows(&rule.inverse), states: rows(&states), d_states: rows(&d_states),
                corrections: rows(&rule.corrections), dv: rows(&dv), value_dots: rows(&value_dots), d_o: rows(&d_o),
                d_o_stride: long(d_o.stride), a: rows(&rule.a), a_stride: long(rule.a.stride), a_log: rows(&rule.a_log),
                dt_bias: rows(&rule.dt_bias), chunks: rows(&rule.chunks),
            };
            let threads = if rule.sizes.key_dim.is_multiple_of(32) { 256 } else { 128 };
            let blocks = [rule.key_heads * rule.chunk_count, threads];
            let arguments = rule.counts(arguments);
            device.delta_launch(rule, DeltaPart::InputsBackward, "delta_inputs_backward", blocks, &arguments);
            let of_parameters = parameters_train.then(|| {
                let sums = device.sum_partial_rows(partial.address, rule.chunk_count, 2 * heads);
                let sums = device.view_of(sums);
                let [a_log, dt_bias] = [0, heads].map(|first| tensor(view(&sums, first, &[heads], vec![1])));
                DeltaParameters { a_log, dt_bias }
            });
            let [qkv, a, b] = [d_qkv, da, db].map(|gradient| tensor(gradient.tensor));
            let start = d_start.map(|d_start| tensor(d_start.tensor));
            DeltaGradients { inputs: DeltaInputs { qkv, a, b }, parameters: of_parameters, start }
        })
    }
}

/// The operands of a pass, and what its chunks need before their states are known.
struct Rule {
    sizes: DeltaSizes,
    key_heads: usize,
    value_heads: usize,
    chunk_count: usize,
    /// Chunks that memory is allocated for.
    chunk_room: usize,
    document_count: usize,
    /// First tokens of chunks, and `n`.
    chunks: MatrixView,
    /// First chunks of documents, and the number of chunks.
    documents: MatrixView,
    qkv: MatrixView,
    a: MatrixView,
    b: MatrixView,
    a_log: MatrixView,
    dt_bias: MatrixView,
    /// Queries and keys of length `k^-0.5` and 1, `[n, key heads * k]`.
    q_hat: MatrixView,
    k_hat: MatrixView,
    /// One over the lengths of queries and of keys, `[2, key heads, n]` f32.
    inverse_lengths: MatrixView,
    /// Sums of decays and beta, `[value heads, n, 4]` f32.
    gates: MatrixView,
    /// Of each chunk and value head, `[64, 64]`.
    inverse: MatrixView,
    scores: MatrixView,
    /// `[n, value heads * v]`.
    corrections: MatrixView,
}

impl Rule {
    fn tokens(&self) -> usize {
        self.qkv.rows
    }

    fn value_size(&self) -> usize {
        self.value_heads * self.sizes.value_dim
    }

    /// Returns the values of queries, keys and values side by side.
    fn values_of(&self, qkv: &MatrixView) -> DeviceBlock {
        qkv.columns(2 * self.key_heads * self.sizes.key_dim, self.value_size())
    }

    /// Adds what every kernel ends with.
    fn counts(&self, arguments: Arguments) -> Arguments {
        arguments! {
            arguments =>
            n: int(self.tokens()), key_heads: int(self.key_heads), value_heads: int(self.value_heads),
        }
    }
}

impl DeltaSizes {
    /// Returns the bytes of a tile of this many columns in shared memory.
    fn tile(self, width: usize, value_bytes: usize) -> usize {
        CHUNK * (width * value_bytes + 16)
    }

    /// Returns the shared bytes of a block of a kernel, by its comment.
    fn shared_bytes(self, name: &str, value_bytes: usize, group: usize) -> usize {
        let Self { key_dim, slice, .. } = self;
        let tile = |width| self.tile(width, value_bytes);
        let state = tile(key_dim) * slice / CHUNK;
        match name {
            "delta_chunks" => (2 * tile(key_dim)).max(34_816) + 2048,
            "delta_scan" => 2 * (tile(key_dim) + tile(CHUNK) + tile(slice) + 1024),
            "delta_output" => tile(key_dim) + state + tile(CHUNK) + tile(slice) + 1024,
            "delta_scan_backward" => 2 * tile(key_dim) + 2 * tile(CHUNK) + tile(slice) + 1024,
            "delta_pairs_backward" => tile(key_dim) + state + tile(CHUNK) + 3 * tile(slice) + 1024,
            "delta_inputs_backward" => {
                2 * tile(key_dim) + 2 * tile(CHUNK) + 2 * (tile(slice) + state) + 3328 + 512 * group
            }
            _ => 0,
        }
    }
}

impl Device {
    /// Returns the sizes for which kernels are compiled; `None` if there are none for these heads or this card.
    fn delta_sizes(&self, spec: &DeltaNetSpec, dtype: DType) -> Option<DeltaSizes> {
        let (key_dim, value_dim) = (spec.key_head_dim, spec.value_head_dim);
        let group = spec.value_heads / spec.key_heads;
        let slices: &[usize] = if dtype == DType::F32 { &[16] } else { &[64, 32, 16] };
        let sizes = |&slice: &usize| DeltaSizes { key_dim, value_dim, slice };
        let fits = |sizes: &DeltaSizes| {
            let names = ["delta_chunks", "delta_scan_backward", "delta_pairs_backward", "delta_inputs_backward"];
            let most = names.map(|name| sizes.shared_bytes(name, dtype.size(), group)).into_iter().max();
            value_dim.is_multiple_of(sizes.slice) && most <= Some(self.shared_bytes())
        };
        has_cuda_kernels(spec).then(|| slices.iter().map(sizes).find(fits)).flatten()
    }

    fn delta_launch(&self, rule: &Rule, of: DeltaPart, name: &'static str, blocks: [usize; 2], arguments: &Arguments) {
        let [blocks, threads] = blocks;
        let dtype = rule.qkv.dtype;
        let shared = rule.sizes.shared_bytes(name, dtype.size(), rule.value_heads / rule.key_heads);
        let shape = LaunchShape { shared_bytes: shared as u32, ..grid(blocks, threads as u32) };
        let bytes = 2 * rule.corrections.bytes() + rule.qkv.bytes();
        let launch = Source::Delta(of, rule.sizes).launch(dtype, name, shape, bytes);
        // SAFETY: the callers give the arguments that the kernel's comment lists, of the sizes that `Rule` has.
        unsafe { self.launch(launch, arguments) };
    }

    /// Computes what the chunks of a pass need before their states are known.
    fn delta_rule(
        &self,
        inputs: DeltaInputs<Cuda>,
        parameters: &DeltaParameters<Cuda>,
        spec: &DeltaNetSpec,
        sizes: DeltaSizes,
        documents: &Documents<Cuda>,
    ) -> Rule {
        let qkv = self.flat(inputs.qkv);
        let [a, b] = [inputs.a, inputs.b].map(|x| self.matrix_as(x, qkv.dtype));
        let [a_log, dt_bias] = [&parameters.a_log, &parameters.dt_bias].map(|x| self.flat_as(x.clone(), DType::F32));
        let (tokens, dtype) = (qkv.rows, qkv.dtype);
        let chunk_count: usize = documents.ranges().map(|range| range.len().div_ceil(CHUNK)).sum();
        let document_count = documents.ranges().count();
        let ints = |count: usize| self.view_of(self.empty([count], DType::I32));
        let chunk_room = chunk_room(tokens, chunk_count);
        let squares = || self.empty_matrix(chunk_room * spec.value_heads * CHUNK, CHUNK, dtype);
        let rule = Rule {
            sizes,
            key_heads: spec.key_heads,
            value_heads: spec.value_heads,
            chunk_count,
            chunk_room,
            document_count,
            chunks: ints(chunk_room + 1),
            documents: ints(document_count + 1),
            q_hat: self.empty_matrix(tokens, spec.key_size(), dtype),
            k_hat: self.empty_matrix(tokens, spec.key_size(), dtype),
            inverse_lengths: self.empty_matrix(2 * spec.key_heads, tokens, DType::F32),
            gates: self.empty_matrix(spec.value_heads * tokens, 4, DType::F32),
            inverse: squares(),
            scores: squares(),
            corrections: self.empty_matrix(tokens, spec.value_size(), dtype),
            qkv,
            a,
            b,
            a_log,
            dt_bias,
        };
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let tables = arguments! {
            chunks: rows(&rule.chunks), documents: rows(&rule.documents), boundaries: rows(&boundaries),
            count: int(document_count), all: int(chunk_count),
        };
        self.delta_launch(&rule, DeltaPart::Chunks, "delta_tables", [1, 256], &tables);
        let arguments = arguments! {
            q_hat: rows(&rule.q_hat), k_hat: rows(&rule.k_hat), inverse_lengths: rows(&rule.inverse_lengths),
            gates: rows(&rule.gates), inverse: rows(&rule.inverse), scores: rows(&rule.scores), qkv: rows(&rule.qkv),
            qkv_stride: long(rule.qkv.stride), a: rows(&rule.a), a_stride: long(rule.a.stride), b: rows(&rule.b),
            b_stride: long(rule.b.stride), a_log: rows(&rule.a_log), dt_bias: rows(&rule.dt_bias),
            chunks: rows(&rule.chunks),
        };
        let blocks = [chunk_count * rule.key_heads, 128];
        self.delta_launch(&rule, DeltaPart::Chunks, "delta_chunks", blocks, &rule.counts(arguments));
        rule
    }

    fn empty_states(&self, rule: &Rule) -> MatrixView {
        let DeltaSizes { key_dim, value_dim, .. } = rule.sizes;
        self.view_of(self.empty([rule.chunk_room, rule.value_heads, value_dim, key_dim], rule.qkv.dtype))
    }

    /// Returns a state of all heads, `[value heads, k, v]` f32.
    fn empty_state(&self, rule: &Rule) -> MatrixView {
        let DeltaSizes { key_dim, value_dim, .. } = rule.sizes;
        self.view_of(self.empty([rule.value_heads, key_dim, value_dim], DType::F32))
    }
}

fn or_null(state: Option<&MatrixView>) -> u64 {
    state.map_or(0, |state| state.address)
}

fn slices(rule: &Rule) -> usize {
    rule.sizes.value_dim / rule.sizes.slice
}

fn scan_blocks(rule: &Rule) -> [usize; 2] {
    [slices(rule) * rule.value_heads * rule.document_count, 2 * rule.sizes.slice]
}
