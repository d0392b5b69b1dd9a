//! Decisions that are made in order, since each counts the memory that the earlier ones need, and small ones that need no separate file.

use firebrick_arch::{LongRopeFactors, MlpSpec, ModelConfig, ModelSpec, Rope, RopeScaling};
use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::{BackendKind, GemmFormat, TRAINED_BYTES, step_work};

use crate::config::{RunConfig, ZeroStage};
use crate::error::RunError;
use crate::plan::backend::{activations, choose_backend};
use crate::plan::inputs::PlanRequest;
use crate::plan::micro_batch::Rows;
use crate::plan::wish::{Wish, bytes};
use crate::plan::{
    Chosen, Made, adapter, answers, deterministic, disk, fit, forecast, memory_choices, schedule, shapes,
    trained_weights,
};

impl<'a> Made<'a> {
    /// Decides everything about a run whose steps have these rows.
    pub(super) fn of(
        wish: &'a Wish<'a>,
        profile: &'a HardwareProfile,
        request: &PlanRequest,
        rows: Rows,
    ) -> Result<Self, RunError> {
        let &Wish { recipe: config, model, data, world_size, .. } = wish;
        let (spec, zero_stage) = (&model.spec, config.train.zero_stage);

        let backend = choose_backend(config.backend, profile)?;
        let (limit, may_offload) = (config.train.device_memory_gib.map(bytes), wish.may_offload());
        let (backend_kind, room) = (backend.value, deterministic::room(config, backend.value));
        let case = fit::Case { profile, backend: backend_kind, spec, may_offload, ranks: world_size, limit, room };
        let compute = activations(config.compute(), backend.value, case.hardware())?;
        let trained = shapes::trained_tensors(spec, wish.lora.as_ref())?;
        trained_weights::check(config, spec, backend.value, compute.value)?;
        let (mut basis, gemms) = shapes::Basis::new(wish, &case, compute.value, &trained, rows.micro_batch_size.value)?;
        let gradients = trained_weights::gradients(&case, &mut basis, &trained);
        let base = adapter::base(config, spec, basis.base)?;
        let router_aux_loss = router_aux_loss(config, model)?;
        let (memory, training) = memory_choices::decide(&case, &basis);

        let (estimate, forced) = fit::check(&case, &training, rows.accumulation, request.force)?;
        let smaller = fit::next_smaller(&case, &training, rows.accumulation);
        let per_step = rows.of_rank() * world_size;
        let steps = schedule::steps(config, data.rows, per_step);
        let extent = forecast::RunLength {
            steps: steps.value,
            micro_batches: rows.accumulation,
            world_size,
            zero_stage,
            documents_per_row: data.documents_per_row,
            price_per_hour: request.price_per_hour,
            round: answers::Round::of(wish),
        };
        let forecast = forecast::forecast(&case, &training, &estimate, extent);
        let every = schedule::whole_steps(config.checkpoint_interval(), data.rows, per_step);
        let completions = config.grpo.as_ref().map_or(0, |grpo| answers::file_bytes(grpo, steps.value, per_step));
        let saves = disk::Saves { steps: steps.value, every, keep: config.checkpoint.keep, completions };
        let disk = disk::decide(config, model, &trained, &saves);
        Ok(Self {
            wish,
            default: config.with_default_keys(),
            profile,
            rows,
            case,
            trained,
            training,
            backend,
            compute,
            gemms,
            base,
            gradients,
            router_aux_loss,
            memory,
            steps,
            estimate,
            forced,
            smaller,
            forecast,
            disk,
        })
    }

    /// Returns the rows per step over all ranks.
    pub(super) fn rows_per_step(&self) -> usize {
        self.rows.of_rank() * self.wish.world_size
    }
}

/// Returns a text with each format's share of the operations.
pub(super) fn arithmetic(made: &Made<'_>) -> Chosen<String> {
    let Made { case, training, wish, .. } = made;
    let document_tokens = training.row_len as f64 / wish.data.documents_per_row.max(1) as f64;
    let fp8 = step_work(case.spec, training, 1, document_tokens).fp8_share();
    if training.gemms == GemmFormat::F16 {
        return Chosen::new(
            "float16, sums in float32".to_owned(),
            "all GEMMs, and attention, as far as matrix units compute them",
        );
    }
    if fp8 == 0.0 {
        return Chosen::new(format!("100 % {}", training.compute), "all GEMMs, and attention");
    }
    let why = format!(
        "GEMMs of the layers forward and for gradients of their inputs in fp8; head, adapters, attention and gradients of weights in {}",
        training.compute
    );
    Chosen::new(format!("{:.0} % fp8, {:.0} % {}", 100.0 * fp8, 100.0 * (1.0 - fp8), training.compute), why)
}

pub(super) fn attention(made: &Made<'_>) -> Option<Chosen<String>> {
    let [kernels, why] = made.backend.value.capped_attention(&made.wish.model.spec)?;
    Some(Chosen::new(kernels, why))
}

/// Says what is left alone of a checkpoint that has other parts than a text model.
pub(super) fn text_model(model: &ModelConfig) -> Option<Chosen<&'static str>> {
    let wrapper = model.wrapper?;
    let (part, checkpoint) = (wrapper.other_part, wrapper.architecture);
    let why = format!("the {part} of the {checkpoint} is not trained; only the text model is loaded and counted");
    Some(Chosen::new("text model", why))
}

fn router_aux_loss(config: &RunConfig, model: &ModelConfig) -> Result<Option<Chosen<f64>>, RunError> {
    if !config.train.router_aux_loss {
        return Ok(None);
    }
    let Some(of_model) = model.router_aux_loss_coef else {
        let is_corrected = (0..model.spec.layers.len()).any(|layer| model.spec.router_correction(layer).is_some());
        let why = match (model.spec.is_mixture(), is_corrected) {
            (true, true) => "balances its experts by a correction of their scores and has no such loss in transformers",
            (true, false) => "has no such loss in transformers",
            (false, _) => "has no experts to balance",
        };
        let problem = format!("train.router_aux_loss: a model of the family \"{}\" {why}", model.model_type);
        return Err(RunError::Refused(format!("{problem}. Remove this key")));
    };
    let of_recipe = config.train.router_aux_loss_coef.map(Chosen::recipe);
    Ok(of_recipe.or(Some(Chosen::new(of_model, "router_aux_loss_coef of config.json"))))
}

pub(super) fn experts(made: &Made<'_>) -> Option<Chosen<String>> {
    let spec = &made.wish.model.spec;
    let (count, top_k) = spec.layers.iter().find_map(|layer| match layer.mlp {
        MlpSpec::Experts { count, top_k, .. } => Some((count, top_k)),
        MlpSpec::Gated { .. } => None,
    })?;
    let mixtures = spec.layers.iter().filter(|layer| layer.mlp.is_mixture()).count();
    let order = match made.backend.value.experts_one_by_one(spec, &made.training) {
        None => "all in one launch, whose sizes stay on the device".to_owned(),
        Some(reason) => format!("one after the other, and the host waits for their numbers of rows: {reason}"),
    };
    let balanced = match &made.router_aux_loss {
        None => "no auxiliary loss balances them".to_owned(),
        Some(weight) => {
            format!("an auxiliary loss with a weight of {} balances them ({})", weight.value, weight.reason)
        }
    };
    let why = format!("{order}; {balanced}");
    let shared = if spec.layers.iter().any(|layer| layer.mlp.shared().is_some()) { " and a shared one" } else { "" };
    let layers = spec.layers.len();
    Some(Chosen::new(format!("{top_k} of {count}{shared} per token in {mixtures} of {layers} layers"), why))
}

/// Chooses longrope's factors once per run; transformers chooses them for each batch, by its longest sequence.
pub(super) fn long_rope(config: &RunConfig, spec: &ModelSpec) -> Option<Chosen<&'static str>> {
    let tokens = config.max_seq_len();
    let of_rope = |rope: &Rope| {
        let RopeScaling::LongRope { original_max_position_embeddings: original, .. } = &rope.scaling else {
            return None;
        };
        let (factors, than) = match rope.scaling.long_rope_factors(tokens)? {
            LongRopeFactors::Short => ("short_factor", "no longer than"),
            LongRopeFactors::Long => ("long_factor", "longer than"),
        };
        let why = format!(
            "max_seq_len {tokens} is {than} original_max_position_embeddings {original}; for the whole run, whatever the length of \
             a document"
        );
        Some(Chosen::new(factors, why))
    };
    spec.ropes.iter().find_map(of_rope)
}

pub(super) fn row_len(made: &Made<'_>) -> Chosen<usize> {
    let Wish { recipe: config, data, .. } = made.wish;
    let how = match (config.pack, config.preference.is_some()) {
        (true, false) => "packed",
        (true, true) => "packed, both answers of a pair in one row",
        (false, false) => "one document per row",
        (false, true) => "one pair of answers per row",
    };
    // Rows without packing are always as long as their documents.
    let is_shorter = config.max_seq_len.is_none() && config.pack && data.row_len < config.max_seq_len();
    let why =
        if is_shorter { "max_seq_len is open, and small data makes more steps in short rows" } else { "max_seq_len" };
    Chosen::new(data.row_len, format!("{why}; {how}: {}", data.report))
}

pub(super) fn ranks(made: &Made<'_>) -> Chosen<usize> {
    let what = match made.wish.recipe.train.zero_stage.divides_weights() {
        true => "its own rows of every step and a share of the model",
        false => "the whole model and its own rows of every step",
    };
    let why = match made.wish.world_size {
        1 => "one process".to_owned(),
        _ => format!("each has {what}; gradients are summed over all. What follows is per rank"),
    };
    Chosen::new(made.wish.world_size, why)
}

pub(super) fn zero_stage(made: &Made<'_>) -> Chosen<ZeroStage> {
    let stage = made.wish.recipe.train.zero_stage;
    let divided = match stage {
        ZeroStage::NONE => return Chosen::new(ZeroStage::NONE, "every rank has all of the optimizer's state"),
        ZeroStage::STATE => "the optimizer's state is",
        ZeroStage::GRADIENTS => "the optimizer's state and the gradients are",
        _ => "the optimizer's state, the gradients and the weights of the layers are",
    };
    match made.wish.world_size {
        1 => Chosen::new(ZeroStage::NONE, "one rank has everything, whatever train.zero_stage says"),
        ranks => Chosen::new(stage, format!("{divided} divided over {ranks} ranks, by parameter")),
    }
}

pub(super) fn eval_micro_batch_size(made: &Made<'_>) -> Chosen<usize> {
    let own = made.rows.micro_batch_size.value;
    let rows = made.wish.recipe.eval.micro_batch_size.unwrap_or(own);
    Chosen::new(rows, if rows == own { "as train.micro_batch_size" } else { "the recipe" })
}

pub(super) fn loss_chunk(made: &Made<'_>) -> Chosen<usize> {
    let vocab_size = made.wish.model.spec.vocab_size;
    let why = format!("logits over {vocab_size} tokens never exist for more positions at a time");
    Chosen::new(made.wish.recipe.train.loss_chunk_tokens, why)
}

pub(super) fn max_positions(made: &Made<'_>) -> Chosen<usize> {
    let Wish { recipe: config, data, .. } = made.wish;
    let positions = data.row_len.max(config.max_seq_len()) + config.eval.max_new_tokens;
    Chosen::new(positions, "the longest row and an answer after it")
}

pub(super) fn prompts_are_chats(made: &Made<'_>) -> Chosen<bool> {
    let has_chats = made.wish.data.has_chats;
    let why = if has_chats { "the data are chats" } else { "the data are plain texts" };
    Chosen::new(has_chats, why)
}

pub(super) fn memory_budget(Made { case, estimate, .. }: &Made<'_>) -> Chosen<u64> {
    let (free, place) = case.available();
    Chosen::new(estimate.total_bytes(), format!("of {} free {place}, {}", human_bytes(free), estimate.peak))
}

pub(super) fn host_memory(Made { case, estimate, .. }: &Made<'_>) -> Chosen<u64> {
    let parts: Vec<String> = estimate.host_lines.iter().map(|line| format!("{}: {}", line.what, line.why)).collect();
    let why = if parts.is_empty() {
        "nothing waits there for the device".to_owned()
    } else {
        format!("{}; of {} free", parts.join("; "), human_bytes(case.profile.memory.available_bytes))
    };
    Chosen::new(estimate.host_bytes(), why)
}

/// Returns the bytes of host memory in which a checkpoint waits until a thread has written it, while steps go on; 0: steps wait.
pub(super) fn snapshot(made: &Made<'_>) -> Chosen<u64> {
    if zero_stage(made).value != ZeroStage::NONE {
        return Chosen::new(0, "steps wait for a checkpoint: all ranks write their parts of the state together");
    }
    let (bytes, what) = match made.training.paged_bytes {
        0 => (made.disk[0].value, "trained weights and optimizer state"),
        _ => (
            TRAINED_BYTES * made.trained.iter().map(|tensor| tensor.elements() as u64).sum::<u64>(),
            "trained weights; steps wait for the optimizer state, which is not copied because it is paged",
        ),
    };
    let left = made.case.left_on_host(&made.estimate);
    if bytes > left {
        let (bytes, left) = (human_bytes(bytes), human_bytes(left));
        let why = format!("steps wait for a checkpoint: a copy takes {bytes} of host memory, where {left} are left");
        return Chosen::new(0, why);
    }
    Chosen::new(bytes, format!("in host memory, from where a thread writes it while steps go on: {what}"))
}

/// Returns the bytes of a card that a checkpoint holds until it is copied to the host: steps that go on write to new memory meanwhile.
pub(super) fn held(made: &Made<'_>) -> Option<Chosen<u64>> {
    // In unified memory the copy is made as soon as it would be held. With several ranks the thread would wait for a rank that is lost.
    let is_apart = ranks(made).value == 1 && made.case.card().is_some_and(|card| !card.unified_memory);
    let is_on_card = made.backend.value == BackendKind::Cuda && made.training.paged_bytes == 0;
    if !is_on_card || !is_apart || snapshot(made).value == 0 {
        return None;
    }
    let bytes = made.training.trained_bytes(&made.wish.model.spec)[0] + made.training.optimizer_bytes;
    // Rows of many lengths leave buffers of each.
    let left = made.case.left(&made.training) / if made.wish.recipe.pack { 1 } else { 2 };
    let [held, free] = [bytes, left].map(human_bytes);
    let (value, why) = match bytes <= left {
        true => (bytes, format!("more on the card, of {free} left, until a thread has copied a checkpoint")),
        false => (0, format!("steps wait until a checkpoint is copied: to hold {held} more, the card has {free} left")),
    };
    Some(Chosen::new(value, why))
}

#[cfg(all(test, feature = "flex"))]
mod tests;
