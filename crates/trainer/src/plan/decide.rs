//! The plan, from what is sized first to the literal, and the decisions that need no file of their own.
//!
//! Trade-off: a decision that only repeats the recipe has "the recipe" as its reason.

use std::path::PathBuf;

use firebrick_arch::{LongRopeFactors, MlpSpec, ModelSpec, Rope, RopeScaling, TensorSpec};
use firebrick_hwprofile::memory::{MemoryEstimate, human_bytes};
use firebrick_kernels::{BackendKind, BaseStorage, GemmFormat, Recompute, TrainingShape, step_work};
use firebrick_precision::Format;

use crate::config::{Init, RunConfig, ZeroStage};
use crate::error::RunError;
use crate::plan::backend::{activations, choose_backend, offload};
use crate::plan::chosen::Chosen;
use crate::plan::fit::SmallerRun;
use crate::plan::forecast::Forecast;
use crate::plan::paging::Paging;
use crate::plan::values::{DataShape, Plan, PlanInputs};
use crate::plan::{
    adapter, answers, base, disk, divided, fit, forecast, fp8, gemm_algorithms, kept_weights, paging, preference,
    schedule, shapes, warnings, workers,
};

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// A backend that cannot be used, a LoRA target that the model does not have, or a run that does not fit into memory (with
    /// the nearest change that does).
    pub fn resolve(inputs: PlanInputs<'_>) -> Result<Self, RunError> {
        let shaped = Shaped::of(&inputs)?;
        let fitted = Fitted::of(&inputs, &shaped)?;
        let steps = schedule::steps(inputs.config, inputs.data, inputs.world_size);
        let forecast = forecast_of(&inputs, &shaped, &fitted.estimate, steps.value);
        Ok(assemble(&inputs, shaped, fitted, forecast, steps))
    }
}

/// How the model is trained, and the decisions that are part of that.
struct Shaped<'a> {
    case: fit::Case<'a>,
    trained: Vec<TensorSpec>,
    training: TrainingShape,
    backend: Chosen<BackendKind>,
    compute: Chosen<Format>,
    gemms: Chosen<GemmFormat>,
    base: Chosen<BaseStorage>,
    answer_tokens: Chosen<usize>,
    paging: Paging,
    kept_weights_bytes: Option<Chosen<u64>>,
}

impl<'a> Shaped<'a> {
    /// In this order: each decision counts the memory that those before it need.
    fn of(inputs: &PlanInputs<'a>) -> Result<Self, RunError> {
        let PlanInputs { config, profile, model, data, world_size, .. } = *inputs;
        let backend = choose_backend(config.backend, profile)?;
        let lora = shapes::lora(config);
        let trained = shapes::trained_tensors(&model.spec, lora.as_ref())?;
        // The state that a rank has; of all trained tensors unless ranks divide it.
        let stated = shapes::largest_share(config, &trained, world_size);
        let may_offload = config.train.offload != Some(false);
        let case = fit::Case { profile, backend: backend.value, spec: &model.spec, may_offload, ranks: world_size };
        let compute = activations(config.compute(), backend.value, case.hardware());
        let mut training = shapes::training(config, compute.value, backend.value, data, &stated);
        training.divided = divided::divided_bytes(
            config.train.zero_stage,
            world_size,
            &model.spec,
            training.base,
            training.lora.as_ref(),
            &trained,
        );
        let gemms = fp8::gemms(config.compute(), &case, &training)?;
        training.gemms = gemms.value;
        let base = base::decide(config, &model.spec, training.base)?;
        let answer_tokens = answers::decide(&case, config, data, &mut training);
        let paging = paging::decide(&case, config, &stated, &mut training);
        let kept_weights_bytes = kept_weights::decide(&case, config, &mut training);
        Ok(Self { case, trained, training, backend, compute, gemms, base, answer_tokens, paging, kept_weights_bytes })
    }
}

/// The memory that a run takes.
struct Fitted {
    estimate: MemoryEstimate,
    /// A shortage that the user chose to ignore.
    forced: Option<Chosen<bool>>,
    smaller: SmallerRun,
}

impl Fitted {
    fn of(inputs: &PlanInputs<'_>, shaped: &Shaped<'_>) -> Result<Self, RunError> {
        let Shaped { case, training, .. } = shaped;
        let accumulation = inputs.config.train.gradient_accumulation;
        let (estimate, forced) = fit::check(case, training, accumulation, inputs.request.force)?;
        Ok(Self { estimate, forced, smaller: fit::next_smaller(case, training, accumulation) })
    }
}

fn forecast_of(
    inputs: &PlanInputs<'_>,
    shaped: &Shaped<'_>,
    estimate: &MemoryEstimate,
    steps: u64,
) -> Option<Forecast> {
    let extent = forecast::Extent {
        steps,
        micro_batches: inputs.config.train.gradient_accumulation,
        world_size: inputs.world_size,
        zero_stage: inputs.config.train.zero_stage,
        documents_per_row: inputs.data.documents_per_row,
        price_per_hour: inputs.request.price_per_hour,
    };
    forecast::forecast(&shaped.case, &shaped.training, estimate, extent)
}

/// The plan of what was sized, with the decisions that nothing else depends on.
fn assemble(
    inputs: &PlanInputs<'_>,
    shaped: Shaped<'_>,
    fitted: Fitted,
    forecast: Option<Forecast>,
    steps: Chosen<u64>,
) -> Plan {
    let PlanInputs { config, profile, model, data, world_size, .. } = *inputs;
    let Shaped { case, trained, training, backend, compute, gemms, base, answer_tokens, paging, kept_weights_bytes } =
        shaped;
    let Fitted { estimate, forced, smaller } = fitted;
    let lora = training.lora.clone();
    let arithmetic = arithmetic(&case, &training, data);
    let (train, eval, default) = (&config.train, &config.eval, config.with_default_keys());
    let checkpoint_every_steps = schedule::every([config, &default].map(RunConfig::checkpoint_interval), inputs);
    let saves = disk::Saves { steps: steps.value, every: checkpoint_every_steps.value, keep: config.checkpoint.keep };
    let [checkpoint_bytes, disk_bytes] = disk::decide(config, model, &trained, &saves);
    Plan {
        name: Chosen::recipe(config.name.clone()),
        output_dir: Chosen::key(PathBuf::from(&config.output_dir), &PathBuf::from(&default.output_dir)),
        model_folder: Chosen::recipe(PathBuf::from(&config.model)),
        init: Chosen::key(config.init, &Init::default()),
        seed: Chosen::key(config.seed, &default.seed),
        data_seed: schedule::data_seed(config),
        shuffle: Chosen::key(config.data.shuffle, &default.data.shuffle),
        world_size: ranks(config, world_size),
        zero_stage: zero_stage(config, world_size),
        compute,
        gemms,
        arithmetic,
        kept_weights_bytes,
        gemm_algorithms: gemm_algorithms::decide(backend.value, config.train.tune_gemms, forecast.as_ref()),
        base,
        trained_parameters: adapter::trained_parameters(inputs, &trained, lora.is_some()),
        lora_init_from: adapter::init_from(config),
        new_tokens: adapter::new_tokens(config, model),
        adapter_dropout: adapter::dropout(config, backend.value),
        loraplus_lr_ratio: adapter::loraplus_lr_ratio(config),
        adapter_gemms: adapter::gemms(backend.value, &model.spec, &training),
        lora: Chosen::new(lora, if config.lora.is_some() { "[lora]" } else { "mode = \"full\"" }),
        preference: preference::preference(config),
        reference: preference::reference(config),
        recompute: recompute(config.recompute()),
        offload: offload(config, backend.value),
        optimizer: paging::optimizer(train.optimizer, backend.value),
        resident_state_bytes: paging.resident,
        paged_state_bytes: paging.paged,
        weight_decay: Chosen::key(train.weight_decay, &default.train.weight_decay),
        adam_beta1: Chosen::key(train.adam_beta1, &default.train.adam_beta1),
        adam_beta2: Chosen::key(train.adam_beta2, &default.train.adam_beta2),
        adam_epsilon: Chosen::key(train.adam_epsilon, &default.train.adam_epsilon),
        max_grad_norm: Chosen::key(train.max_grad_norm, &default.train.max_grad_norm),
        max_seq_len: Chosen::key(config.max_seq_len, &default.max_seq_len),
        pack: Chosen::key(config.pack, &default.pack),
        row_len: row_len(config, data),
        max_positions: Chosen::new(
            data.row_len.max(config.max_seq_len) + eval.max_new_tokens,
            "the longest row and an answer after it",
        ),
        attention: attention(backend.value, &model.spec, config.compute().activations()),
        experts: experts(&model.spec),
        long_rope: long_rope(config, &model.spec),
        micro_batch_size: Chosen::key(train.micro_batch_size, &default.train.micro_batch_size),
        gradient_accumulation: schedule::accumulation(config, world_size),
        learning_rate: schedule::learning_rate(config, &default),
        warmup_steps: schedule::warmup(config, steps.value),
        schedule: Chosen::key(train.schedule, &default.train.schedule),
        min_lr: Chosen::key(train.min_lr, &default.train.min_lr),
        loss_chunk_tokens: loss_chunk(train.loss_chunk_tokens, model.spec.vocab_size),
        log_every: schedule::every([config, &default].map(RunConfig::log_interval), inputs),
        eval_every_steps: schedule::every([config, &default].map(RunConfig::eval_interval), inputs),
        is_evaluated: config.has_eval_data() || !eval.prompts.is_empty(),
        eval_on_start: Chosen::key(eval.on_start, &default.eval.on_start),
        eval_micro_batch_size: eval_micro_batch_size(config),
        eval_max_batches: Chosen::key(eval.max_batches, &default.eval.max_batches),
        exact_match_prompts: Chosen::key(eval.exact_match_prompts, &default.eval.exact_match_prompts),
        answer_tokens,
        extract: Chosen::key(eval.extract.clone(), &default.eval.extract),
        max_new_tokens: Chosen::key(eval.max_new_tokens, &default.eval.max_new_tokens),
        sample_prompts: Chosen::key(eval.prompts.clone(), &default.eval.prompts),
        prompts_are_chats: prompts_are_chats(data),
        checkpoint_every_steps,
        checkpoints_kept: Chosen::key(config.checkpoint.keep, &default.checkpoint.keep),
        checkpoint_bytes,
        disk_bytes,
        tokenize_workers: workers::to_tokenize(config, profile),
        loader_workers: workers::to_load(config, profile, backend.value),
        memory_bytes: memory_budget(&case, &estimate),
        host_memory_bytes: host_memory(&case, &estimate),
        memory: estimate.lines,
        forced,
        mlflow: config.mlflow.clone().map(Chosen::recipe),
        forecast,
        warnings: warnings::of(config, &model.spec, data, world_size),
        training,
        smaller,
        backend,
        steps,
    }
}

/// Which share of the operations is in which format.
fn arithmetic(case: &fit::Case<'_>, training: &TrainingShape, data: &DataShape) -> Chosen<String> {
    let document_tokens = training.row_len as f64 / data.documents_per_row.max(1) as f64;
    let fp8 = step_work(case.spec, training, 1, document_tokens).fp8_share();
    if fp8 == 0.0 {
        return Chosen::new(format!("100 % {}", training.compute), "all GEMMs, and attention");
    }
    let why = format!(
        "GEMMs of the layers forward and for gradients of their inputs in fp8; head, adapters, attention and gradients of weights in {}",
        training.compute
    );
    Chosen::new(format!("{:.0} % fp8, {:.0} % {}", 100.0 * fp8, 100.0 * (1.0 - fp8), training.compute), why)
}

fn recompute(recompute: Recompute) -> Chosen<Recompute> {
    let why = match recompute {
        Recompute::Full => {
            "layers save their input and run forward twice, except for their last GEMM: the least is saved"
        }
        Recompute::Projections => {
            "layers save the inputs of attention and of the MLP, and attention's output; attention does not run twice"
        }
        Recompute::Selective => {
            "layers save the outputs of GEMMs and attention; norms and activation functions are computed again, which costs little"
        }
        Recompute::None => "layers save all that their backward reads: maximum memory, minimum work",
    };
    Chosen::new(recompute, why)
}

fn attention(backend: BackendKind, spec: &ModelSpec, compute: Format) -> Option<Chosen<String>> {
    let [kernels, why] = backend.capped_attention(spec, compute)?;
    Some(Chosen::new(kernels, why))
}

fn experts(spec: &ModelSpec) -> Option<Chosen<String>> {
    let (count, top_k) = spec.layers.iter().find_map(|layer| match layer.mlp {
        MlpSpec::Experts { count, top_k, .. } => Some((count, top_k)),
        MlpSpec::Gated { .. } => None,
    })?;
    let mixtures = spec.layers.iter().filter(|layer| layer.mlp.is_mixture()).count();
    let why = "one after the other, each as GEMMs over its own rows; in each pass over such a layer the host waits once for the numbers of rows, \
               which decide the sizes of the GEMMs. No auxiliary loss balances the experts";
    Some(Chosen::new(format!("{top_k} of {count} per token in {mixtures} of {} layers", spec.layers.len()), why))
}

/// transformers chooses for each batch, by its longest sequence; a run chooses once.
fn long_rope(config: &RunConfig, spec: &ModelSpec) -> Option<Chosen<&'static str>> {
    let tokens = config.max_seq_len;
    let of_rope = |rope: &Rope| match &rope.scaling {
        RopeScaling::LongRope { original_max_position_embeddings: original, .. } => {
            let (factors, than) = match rope.scaling.long_rope_factors(tokens)? {
                LongRopeFactors::Short => ("short_factor", "no longer than"),
                LongRopeFactors::Long => ("long_factor", "longer than"),
            };
            let why = format!(
                "max_seq_len {tokens} is {than} original_max_position_embeddings {original}; for the whole run, whatever the length of \
                 a document"
            );
            Some(Chosen::new(factors, why))
        }
        RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } | RopeScaling::Yarn { .. } => {
            None
        }
    };
    spec.ropes.iter().find_map(of_rope)
}

fn row_len(config: &RunConfig, data: &DataShape) -> Chosen<usize> {
    let how = match (config.pack, config.preference.is_some()) {
        (true, false) => "packed",
        (true, true) => "packed, both answers of a pair in one row",
        (false, false) => "one document per row",
        (false, true) => "one pair of answers per row",
    };
    Chosen::new(data.row_len, format!("max_seq_len; {how}: {}", data.report))
}

fn ranks(config: &RunConfig, world_size: usize) -> Chosen<usize> {
    let why = match (world_size, config.train.zero_stage) {
        (1, _) => "one process",
        (_, stage) if stage.divides_weights() => {
            "each has its own rows of every step and a share of the model; gradients are summed over all. What follows is per rank"
        }
        _ => {
            "each has the whole model and its own rows of every step; gradients are summed over all. What follows is per rank"
        }
    };
    Chosen::new(world_size, why)
}

fn zero_stage(config: &RunConfig, world_size: usize) -> Chosen<ZeroStage> {
    let divided = match config.train.zero_stage {
        ZeroStage::NONE => return Chosen::new(ZeroStage::NONE, "every rank has all of the optimizer's state"),
        ZeroStage::STATE => "the optimizer's state is",
        ZeroStage::GRADIENTS => "the optimizer's state and the gradients are",
        _ => "the optimizer's state, the gradients and the weights of the layers are",
    };
    match world_size {
        1 => Chosen::new(ZeroStage::NONE, "one rank has everything, whatever train.zero_stage says"),
        ranks => Chosen::new(config.train.zero_stage, format!("{divided} divided over {ranks} ranks, by parameter")),
    }
}

fn eval_micro_batch_size(config: &RunConfig) -> Chosen<usize> {
    let rows = config.eval_micro_batch_size();
    Chosen::new(rows, if rows == config.train.micro_batch_size { "as train.micro_batch_size" } else { "the recipe" })
}

fn loss_chunk(tokens: usize, vocab_size: usize) -> Chosen<usize> {
    Chosen::new(tokens, format!("logits over {vocab_size} tokens never exist for more positions at a time"))
}

fn prompts_are_chats(data: &DataShape) -> Chosen<bool> {
    let why = if data.has_chats { "the data are chats" } else { "the data are plain texts" };
    Chosen::new(data.has_chats, why)
}

fn memory_budget(case: &fit::Case<'_>, estimate: &MemoryEstimate) -> Chosen<u64> {
    let (free, place) = case.available();
    Chosen::new(estimate.total_bytes(), format!("of {} free {place}, {}", human_bytes(free), estimate.peak))
}

fn host_memory(case: &fit::Case<'_>, estimate: &MemoryEstimate) -> Chosen<u64> {
    let parts: Vec<String> = estimate.host_lines.iter().map(|line| format!("{}: {}", line.what, line.why)).collect();
    let why = if parts.is_empty() {
        "nothing waits there for the device".to_owned()
    } else {
        format!("{}; of {} free", parts.join("; "), human_bytes(case.profile.memory.available_bytes))
    };
    Chosen::new(estimate.host_bytes(), why)
}

#[cfg(all(test, feature = "flex"))]
mod tests;
