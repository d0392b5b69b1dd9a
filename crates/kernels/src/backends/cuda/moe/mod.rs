//! Routing of tokens to experts on CUDA. Kernels: `routing.cu`.
//!
//! Choice, order, counts and sums stay on the device. The host reads the rows of each expert only where something asks for them
//! ([`crate::linear::ExpertRows::counts`]).

mod grouped;

use burn_tensor::{DType, Tensor};
use firebrick_arch::{ExpertGroups, RouterScores, RouterSpec};

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DISPATCHED_ROWS, Launch, MAX_EXPERTS, MatrixView, Source, TOKENS_PER_BLOCK, arguments, grid,
    int_tensor, tensor,
};
use crate::backends::planning::rows::ROW_MULTIPLE;
use crate::linear::ExpertRows;
use crate::moe::reference::check as check_router;
use crate::{Combined, MoeOps, Routing};

impl MoeOps for Cuda {
    fn route(
        logits_ne: Tensor<Self, 2>,
        top_k: usize,
        router: RouterSpec,
        correction_e: Option<Tensor<Self, 1>>,
        scale_e: Option<Tensor<Self, 1>>,
    ) -> Routing<Self> {
        in_section(&logits_ne.device(), |device| {
            let logits = device.flat(logits_ne);
            let (tokens, experts) = (logits.rows, logits.width);
            check_router(experts, top_k, router.groups);
            assert!(experts <= MAX_EXPERTS, "{experts} experts, at most {MAX_EXPERTS}");
            let [correction, expert_scale] = [&correction_e, &scale_e].map(|vector_e| device.over_experts(vector_e));
            let mut vectors = [&correction, &expert_scale].into_iter().flatten();
            assert!(vectors.all(|vector| (vector.width, vector.dtype) == (experts, DType::F32)));
            let scores = device.empty_matrix(tokens, experts, DType::F32);
            let chosen = device.empty_matrix(tokens, top_k, DType::I32);
            let weights = device.empty_matrix(tokens, top_k, DType::F32);
            let bytes = logits.bytes() + scores.bytes() + chosen.bytes() + weights.bytes();
            let launch = routing_launch("route_top_k", logits.dtype, tokens.div_ceil(TOKENS_PER_BLOCK), bytes);
            let groups = router.groups.unwrap_or(ExpertGroups { count: 0, chosen: 0 });
            let arguments = arguments! {
                scores: rows(&scores), experts: rows(&chosen), weights: rows(&weights), logits: rows(&logits),
                correction: address(address_of(correction.as_ref())),
                expert_scale: address(address_of(expert_scale.as_ref())), n: long(tokens), e: int(experts),
                k: int(top_k), sigmoid: i32(i32::from(router.scores == RouterScores::Sigmoid)),
                normalizes: i32(i32::from(router.normalizes)), scale: f32(router.scale as f32),
                epsilon: f32(router.epsilon as f32), groups: int(groups.count), chosen_groups: int(groups.chosen),
            };
            // SAFETY: logits and scores are [n, e], the correction and the scale [e] or null, the others [n, k], all dense; e is at most what a
            // warp's masks hold, and the groups divide it.
            unsafe { device.launch(launch, &arguments) };
            let choices = chosen.count();
            let counts = device.integers(experts);
            let launch = routing_launch("count_rows", DType::F32, experts, chosen.bytes());
            let arguments = arguments! { counts: rows(&counts), experts: rows(&chosen), choices: long(choices) };
            // SAFETY: `chosen` holds that many i32, `counts` one per expert.
            unsafe { device.launch(launch, &arguments) };
            let rows_nk = device.empty_matrix(chosen.rows, top_k, DType::I32);
            let (choices_s, tokens_s, starts) =
                (device.integers(choices), device.integers(choices), device.integers(experts + 1));
            let launch = routing_launch("place_rows", DType::F32, experts, 4 * chosen.bytes());
            let arguments = arguments! {
                rows: rows(&rows_nk), choices_of: rows(&choices_s), tokens: rows(&tokens_s), starts: rows(&starts),
                experts: rows(&chosen), counts: rows(&counts), choices: long(choices), k: int(top_k),
            };
            // SAFETY: the first three outputs have one i32 per choice, the starts one per expert and one more, and each choice has an
            // expert below the number of blocks.
            unsafe { device.launch(launch, &arguments) };
            Routing {
                scores_ne: tensor(scores.tensor),
                experts_nk: int_tensor(chosen.tensor),
                weights_nk: tensor(weights.tensor),
                scale_e,
                router,
                rows_nk: int_tensor(rows_nk.tensor),
                choices_s: int_tensor(choices_s.tensor),
                tokens_s: int_tensor(tokens_s.tensor),
                rows: ExpertRows::new(int_tensor(starts.tensor)),
            }
        })
    }

    fn route_backward(
        routing: &Routing<Self>,
        d_weights_nk: Tensor<Self, 2>,
        like_nd: &Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        in_section(&d_weights_nk.device(), |device| {
            let (d_weights, dtype) = (device.flat(d_weights_nk), like_nd.dtype());
            let RouterSpec { scores: kind, normalizes, epsilon, scale, .. } = routing.router;
            let scores = device.flat(routing.scores_ne.clone());
            let chosen = device.int_matrix(routing.experts_nk.clone());
            let weights = device.flat(routing.weights_nk.clone());
            let expert_scale = device.over_experts(&routing.scale_e);
            let d_logits = device.empty_matrix(scores.rows, scores.width, dtype);
            let bytes = scores.bytes() + d_logits.bytes() + 3 * weights.bytes();
            let blocks = scores.rows.div_ceil(TOKENS_PER_BLOCK);
            let arguments = arguments! {
                d_logits: rows(&d_logits), scores: rows(&scores), experts: rows(&chosen), weights: rows(&weights),
                d_weights: rows(&d_weights), expert_scale: address(address_of(expert_scale.as_ref())),
                n: long(scores.rows), e: int(scores.width), k: int(weights.width), sigmoid: i32(i32::from(kind == RouterScores::Sigmoid)),
                normalizes: i32(i32::from(normalizes)), scale: f32(scale as f32), epsilon: f32(epsilon as f32),
            };
            // SAFETY: shapes as in `route`, and the gradient of the weights has theirs.
            unsafe { device.launch(routing_launch("route_backward", dtype, blocks, bytes), &arguments) };
            tensor(d_logits.tensor)
        })
    }

    fn dispatch(x_nd: Tensor<Self, 2>, routing: &Routing<Self>) -> Tensor<Self, 2> {
        in_section(&x_nd.device(), |device| {
            let (x, tokens) = (device.flat(x_nd), device.int_matrix(routing.tokens_s.clone()));
            // Room for the low-rank columns of the experts that read the rows.
            let to = device.empty_with_room([tokens.count(), x.width], ROW_MULTIPLE, x.dtype);
            let arguments = arguments! {
                y: rows(&to), x: rows(&x), tokens: rows(&tokens), rows: int(to.rows), d: int(x.width),
                y_stride: long(to.stride),
            };
            let blocks = to.rows.div_ceil(DISPATCHED_ROWS);
            let launch = routing_launch("dispatch_rows", x.dtype, blocks, x.bytes() + to.bytes());
            // SAFETY: x is dense, `to` has one row of its width per token, at the stride given.
            unsafe { device.launch(launch, &arguments) };
            tensor(to.tensor)
        })
    }

    fn combine(y_sd: Tensor<Self, 2>, routing: &Routing<Self>, combined: Combined<Self>) -> Tensor<Self, 2> {
        in_section(&y_sd.device(), |device| {
            let x = device.flat(y_sd);
            let weights = || device.flat(routing.weights_nk.clone());
            let (weights, residual) = match combined {
                Combined::Rows => (None, None),
                Combined::Weighted => (Some(weights()), None),
                Combined::WeightedOnto(residual) => (Some(weights()), Some(device.flat_as(residual, x.dtype))),
            };
            let rows = device.int_matrix(routing.rows_nk.clone());
            let y = device.empty_matrix(rows.rows, x.width, x.dtype);
            let bytes = x.bytes() + y.bytes() * (1 + usize::from(residual.is_some()));
            let arguments = arguments! {
                y: rows(&y), x: rows(&x), rows: rows(&rows), weights: address(address_of(weights.as_ref())),
                residual: address(address_of(residual.as_ref())), k: int(rows.width), d: int(x.width),
            };
            // SAFETY: x is [n k, d], rows and weights are [n, k], residual and y [n, d], all dense.
            unsafe { device.launch(routing_launch("combine_rows", x.dtype, y.rows, bytes), &arguments) };
            tensor(y.tensor)
        })
    }

    fn combine_backward(
        y_sd: Tensor<Self, 2>,
        routing: &Routing<Self>,
        dy_nd: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        in_section(&y_sd.device(), |device| {
            let y = device.flat(y_sd);
            let dy = device.matrix_as(dy_nd, y.dtype);
            let weights = device.flat(routing.weights_nk.clone());
            let choices = device.int_matrix(routing.choices_s.clone());
            let dx = device.empty_with_room([y.rows, y.width], ROW_MULTIPLE, y.dtype);
            let d_weights = device.empty_matrix(weights.rows, weights.width, DType::F32);
            let arguments = arguments! {
                dx: rows(&dx), d_weights: rows(&d_weights), y: rows(&y), dy: rows(&dy), weights: rows(&weights),
                choices_of: rows(&choices), k: int(weights.width), d: int(y.width), dx_stride: long(dx.stride),
                dy_stride: long(dy.stride),
            };
            let launch = routing_launch("combine_rows_backward", y.dtype, y.rows, 3 * y.bytes());
            // SAFETY: y and dx are [n k, d] and dy is [n, d], dx and dy at strides, the weights [n, k], and every choice has one row.
            unsafe { device.launch(launch, &arguments) };
            (tensor(dx.tensor), tensor(d_weights.tensor))
        })
    }
}

fn routing_launch(name: &'static str, dtype: DType, blocks: usize, bytes: usize) -> Launch {
    Source::Routing.launch(dtype, name, grid(blocks, 256), bytes)
}

/// Returns the address of a matrix that there may be; the kernels read no null pointer.
fn address_of(matrix: Option<&MatrixView>) -> u64 {
    matrix.map_or(0, |matrix| matrix.address)
}

impl Device {
    /// Returns a vector over experts as kernels read it.
    fn over_experts(&self, vector_e: &Option<Tensor<Cuda, 1>>) -> Option<MatrixView> {
        vector_e.as_ref().map(|vector_e| self.flat(vector_e.clone().unsqueeze::<2>()))
    }

    fn integers(&self, count: usize) -> MatrixView {
        self.view_of(self.empty([count], DType::I32))
    }
}
