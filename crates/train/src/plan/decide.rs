//! The decisions of a plan, one function each, and the plan they make together.
//!
//! Trade-off: a decision that only repeats the recipe has "the recipe" as its reason.

use std::path::PathBuf;

use firebrick_arch::{LongRopeFactors, MlpSpec, ModelSpec, Role, Rope, RopeScaling};
use firebrick_hwprofile::memory::{MemoryEstimate, human_bytes};
use firebrick_kernels::{BackendKind, Recompute, TrainingShape, step_work};
use firebrick_precision::Format;

use crate::config::{Init, Interval, Mode, RunConfig, RunLength, Warmup};
use crate::error::RunError;
use crate::plan::backend::{activations, choose_backend, offload};
use crate::plan::chosen::Chosen;
use crate::plan::values::{DataShape, Plan, PlanInputs};
use crate::plan::{
    answers, base, divided, fit, forecast, fp8, gemm_algorithms, kept_weights, paging, preference, shapes, workers,
};

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// A backend that cannot be used, a LoRA target that the model does not have, or a run that does not fit into memory (with
    /// the nearest change that does).
    pub fn resolve(inputs: PlanInputs<'_>) -> Result<Self, RunError> {
        plan(&inputs)
    }
}

fn plan(inputs: &PlanInputs<'_>) -> Result<Plan, RunError> {
    let PlanInputs { config, profile, model, data, world_size, request } = *inputs;
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
    let (estimate, forced) = fit::check(&case, &training, config.train.gradient_accumulation, request.force)?;
    let smaller = fit::next_smaller(&case, &training, config.train.gradient_accumulation);
    let steps = steps(config, data, world_size);
    let extent = forecast::Extent {
        steps: steps.value,
        micro_batches: config.train.gradient_accumulation,
        world_size,
        zero_stage: config.train.zero_stage,
        documents_per_row: data.documents_per_row,
        price_per_hour: request.price_per_hour,
    };
    let forecast = forecast::forecast(&case, &training, &estimate, extent);
    let arithmetic = arithmetic(&case, &training, data);
    let (train, eval, default) = (&config.train, &config.eval, config.with_default_keys());
    Ok(Plan {
        name: Chosen::recipe(config.name.clone()),
        output_dir: Chosen::key(PathBuf::from(&config.output_dir), &PathBuf::from(&default.output_dir)),
        model_folder: Chosen::recipe(PathBuf::from(&config.model)),
        init: Chosen::key(config.init, &Init::default()),
        seed: Chosen::key(config.seed, &default.seed),
        data_seed: data_seed(config),
        shuffle: Chosen::key(config.data.shuffle, &default.data.shuffle),
        world_size: ranks(config, world_size),
        zero_stage: zero_stage(config, world_size),
        compute,
        gemms,
        arithmetic,
        kept_weights_bytes,
        gemm_algorithms: gemm_algorithms::decide(backend.value, config.train.tune_gemms, forecast.as_ref()),
        base,
        trained_parameters: trained_parameters(inputs, &trained, lora.is_some()),
        lora_init_from: lora_init_from(config),
        new_tokens: new_tokens(config, model),
        adapter_dropout: adapter_dropout(config, backend.value),
        loraplus_lr_ratio: loraplus_lr_ratio(config),
        adapter_gemms: adapter_gemms(backend.value, &model.spec, &training),
        lora: Chosen::new(lora, if config.lora.is_some() { "[lora]" } else { "mode = \"full\"" }),
        preference: preference::preference(config),
        reference: preference::reference(config),
        recompute: recompute(config.recompute()),
        offload: offload(config, backend.value),
        optimizer: Chosen::new(train.optimizer, train.optimizer.state()),
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
        gradient_accumulation: accumulation(config, world_size),
        learning_rate: learning_rate(config, &default),
        warmup_steps: warmup(config, steps.value),
        schedule: Chosen::key(train.schedule, &default.train.schedule),
        min_lr: Chosen::key(train.min_lr, &default.train.min_lr),
        loss_chunk_tokens: loss_chunk(train.loss_chunk_tokens, model.spec.vocab_size),
        log_every: every([config, &default].map(RunConfig::log_interval), inputs),
        eval_every_steps: every([config, &default].map(RunConfig::eval_interval), inputs),
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
        checkpoint_every_steps: every([config, &default].map(RunConfig::checkpoint_interval), inputs),
        checkpoints_kept: Chosen::key(config.checkpoint.keep, &default.checkpoint.keep),
        tokenize_workers: workers::to_tokenize(config, profile),
        loader_workers: workers::to_load(config, profile, backend.value),
        memory_bytes: memory_budget(&case, &estimate),
        host_memory_bytes: host_memory(&case, &estimate),
        memory: estimate.lines,
        forced,
        mlflow: config.mlflow.clone().map(Chosen::recipe),
        forecast,
        training,
        smaller,
        backend,
        steps,
    })
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

fn trained_parameters(inputs: &PlanInputs<'_>, trained: &[firebrick_arch::TensorSpec], has_lora: bool) -> Chosen<u64> {
    let count: u64 = trained.iter().map(|tensor| tensor.elements() as u64).sum();
    if !has_lora {
        return Chosen::new(count, "all of them");
    }
    let total = inputs.model.spec.parameters();
    let rank = inputs.config.lora.as_ref().map_or(0, |lora| lora.r);
    let share = 100.0 * count as f64 / total as f64;
    let kind = if inputs.config.lora.as_ref().is_some_and(|lora| lora.use_dora) { "DoRA" } else { "LoRA" };
    let whole = trained.iter().filter(|tensor| !matches!(tensor.role, Role::LoraA | Role::LoraB | Role::LoraMagnitude));
    let whole: u64 = whole.filter(|tensor| tensor.role != Role::TokenRows).map(|tensor| tensor.elements() as u64).sum();
    let rows = trained.iter().filter(|tensor| tensor.role == Role::TokenRows);
    let rows: u64 = rows.map(|tensor| tensor.shape[0] as u64).sum();
    let rows = if rows > 0 { format!(", and {rows} rows of tokens") } else { String::new() };
    let whole = if whole > 0 { format!(", {whole} of them in modules_to_save") } else { String::new() };
    Chosen::new(count, format!("{kind} of rank {rank}: {share:.2} % of {total} parameters{whole}{rows}"))
}

fn lora_init_from(config: &RunConfig) -> Chosen<Option<PathBuf>> {
    let folder = config.lora.as_ref().and_then(|lora| lora.init_from.as_ref()).map(PathBuf::from);
    if let Some(lora) = config.lora.as_ref().filter(|lora| !lora.init_lora_weights.is_uniform()) {
        let why = format!(
            "{}: the principal part of each weight, which the base loses before it is stored; saved with rank {} for the original base",
            lora.init_lora_weights,
            2 * lora.r
        );
        return Chosen::new(folder, why);
    }
    let why = match (folder.is_some(), config.lora.as_ref().is_some_and(|lora| lora.use_dora)) {
        (true, _) => "its matrices; the optimizer starts from zero",
        (false, false) => "A is random, B is zero",
        (false, true) => "A is random, B is zero, magnitudes are the norms of the rows",
    };
    Chosen::new(folder, why)
}

fn new_tokens(config: &RunConfig, model: &firebrick_arch::ModelConfig) -> Option<Chosen<Vec<String>>> {
    let (first, last) = (model.new_tokens.first()?, model.new_tokens.last()?);
    let (stored, rows) = (model.stored_vocab_size, model.spec.vocab_size);
    let tables = match rows == stored {
        true => format!("rows that the {stored} of the model's tables have to spare"),
        false => format!("its tables grow from {stored} to {rows} rows"),
    };
    let trains = if config.lora.is_some() { "of the tables only these train" } else { "all rows train" };
    let tokens = config.data.new_tokens.iter().chain(&config.data.new_special_tokens).cloned().collect();
    Some(Chosen::new(
        tokens,
        format!("ids {first} to {last}: {tables}; they start at the mean of the others; {trains}"),
    ))
}

fn adapter_dropout(config: &RunConfig, backend: BackendKind) -> Option<Chosen<f64>> {
    let dropout = config.lora.as_ref()?.lora_dropout;
    let how = if backend == BackendKind::Cuda {
        "computed again in each pass, never stored; the adapters' part of the gradient of an input is a GEMM of its own"
    } else {
        "computed by one CPU thread and copied to the device in each pass"
    };
    (dropout > 0.0).then(|| Chosen::new(dropout, format!("one mask per group and micro-batch, {how}")))
}

fn loraplus_lr_ratio(config: &RunConfig) -> Option<Chosen<f64>> {
    let ratio = config.lora.as_ref()?.loraplus_lr_ratio?;
    let rate = ratio * config.learning_rate();
    Some(Chosen::new(
        ratio,
        format!("LoRA+: B and trained vectors learn at {rate:e}, everything else at the learning rate"),
    ))
}

fn adapter_gemms(backend: BackendKind, spec: &ModelSpec, training: &TrainingShape) -> Option<Chosen<String>> {
    let why = if backend == BackendKind::Cuda {
        "few ranks join the base's GEMM, exact at any size; many, or those on a base that is not quantized, are cheaper on their own"
    } else {
        "two small GEMMs per module"
    };
    Some(Chosen::new(backend.adapter_gemms(spec, training)?, why))
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
        (_, 3..) => {
            "each has its own rows of every step and a share of the model; gradients are summed over all. What follows is per rank"
        }
        _ => {
            "each has the whole model and its own rows of every step; gradients are summed over all. What follows is per rank"
        }
    };
    Chosen::new(world_size, why)
}

fn zero_stage(config: &RunConfig, world_size: usize) -> Chosen<u8> {
    let divided = match config.train.zero_stage {
        0 => return Chosen::new(0, "every rank has all of the optimizer's state"),
        1 => "the optimizer's state is",
        2 => "the optimizer's state and the gradients are",
        _ => "the optimizer's state, the gradients and the weights of the layers are",
    };
    match world_size {
        1 => Chosen::new(0, "one rank has everything, whatever train.zero_stage says"),
        ranks => Chosen::new(config.train.zero_stage, format!("{divided} divided over {ranks} ranks, by parameter")),
    }
}

fn accumulation(config: &RunConfig, world_size: usize) -> Chosen<usize> {
    let own = config.rows_per_step();
    let rows = own * world_size;
    let ranks = if world_size == 1 { String::new() } else { format!(" ({own} on each of {world_size} ranks)") };
    Chosen::new(
        config.train.gradient_accumulation,
        format!("{rows} rows per step{ranks}, one loss denominator over all of them"),
    )
}

fn steps(config: &RunConfig, data: &DataShape, world_size: usize) -> Chosen<u64> {
    let (rows, per_step) = (data.rows, config.rows_per_step() * world_size);
    match config.length() {
        RunLength::Steps(steps) => {
            let epochs = (steps * per_step as u64) as f64 / rows as f64;
            Chosen::new(steps, format!("the recipe: {epochs:.2} epochs of {rows} rows"))
        }
        RunLength::Epochs(epochs) => {
            let steps = (epochs * rows as f64 / per_step as f64).ceil().max(1.0) as u64;
            Chosen::new(steps, format!("{epochs} epochs of {rows} rows, {per_step} rows per step, rounded up"))
        }
    }
}

fn learning_rate(config: &RunConfig, default: &RunConfig) -> Chosen<f64> {
    let (rate, usual) = (config.learning_rate(), default.learning_rate());
    if rate != usual {
        return Chosen::recipe(rate);
    }
    let trains = if config.mode() == Mode::Full { "all weights" } else { "adapters" };
    let on = if config.preference.is_some() { " on pairs of answers" } else { "" };
    Chosen::new(rate, format!("the default for {trains}{on}"))
}

fn data_seed(config: &RunConfig) -> Chosen<u64> {
    let seed = config.data_seed();
    Chosen::new(seed, if config.data.data_seed.is_some() { "the recipe" } else { "as seed" })
}

fn eval_micro_batch_size(config: &RunConfig) -> Chosen<usize> {
    let rows = config.eval_micro_batch_size();
    Chosen::new(rows, if rows == config.train.micro_batch_size { "as train.micro_batch_size" } else { "the recipe" })
}

/// Steps between two evaluations, checkpoints or lines of metrics.
fn every([interval, default]: [Interval; 2], inputs: &PlanInputs<'_>) -> Chosen<u64> {
    match interval {
        Interval::Steps(steps) => Chosen::new(steps, if interval == default { "the default" } else { "the recipe" }),
        Interval::Epochs(epochs) => {
            let (rows, per_step) = (inputs.data.rows, inputs.config.rows_per_step() * inputs.world_size);
            let steps = (epochs * rows as f64 / per_step as f64).round().max(1.0) as u64;
            Chosen::new(steps, format!("{epochs} epochs of {rows} rows, {per_step} rows per step, rounded"))
        }
    }
}

fn warmup(config: &RunConfig, steps: u64) -> Chosen<u64> {
    match config.warmup() {
        Warmup::Steps(warmup) => Chosen::recipe(warmup),
        Warmup::Ratio(ratio) => {
            // Less a rounding error of the product, which must not make a step more.
            let warmup = (ratio * steps as f64 - 1e-9).ceil().max(0.0) as u64;
            Chosen::new(warmup, format!("{:.1} % of the steps, rounded up", 100.0 * ratio))
        }
    }
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebrick_arch::ModelConfig;
    use firebrick_hwprofile::HardwareProfile;
    use firebrick_kernels::BaseStorage;
    use firebrick_optim::OptimizerKind;
    use firebrick_precision::{Format, QuantFormat};

    use super::*;
    use crate::plan::PlanRequest;

    const MODEL: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": true}"#;

    fn resolve(changes: &[&str]) -> Result<Plan, RunError> {
        resolve_for(MODEL, 1, changes)
    }

    fn resolve_for(model: &str, world_size: usize, changes: &[&str]) -> Result<Plan, RunError> {
        let recipe = "name='n'\nmodel='m'\nbackend='flex'\nmax_seq_len=64\n[lora]\nr=4\n[data]\npath='d'\n";
        let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
        let config = RunConfig::from_toml(recipe, Path::new("r.toml"), &changes).unwrap();
        let profile = HardwareProfile::described(4, 8 << 30, Vec::new());
        let model = ModelConfig::parse(model, Path::new("config.json")).unwrap();
        let data = DataShape {
            rows: 100,
            row_len: 64,
            longest_document: 20,
            documents_per_row: 4,
            has_chats: true,
            report: "full".to_owned(),
        };
        let request = PlanRequest::default();
        Plan::resolve(PlanInputs {
            config: &config,
            profile: &profile,
            model: &model,
            data: &data,
            world_size,
            request: &request,
        })
    }

    #[test]
    #[cfg(feature = "flex")]
    fn ranks_multiply_the_rows_of_a_step_and_zero_divides_the_state() {
        let full = ["lora=", "mode=full", "train.micro_batch_size=2", "train.gradient_accumulation=3"];
        let whole = resolve_for(MODEL, 4, &full).unwrap();
        assert_eq!((whole.rows_per_step(), whole.steps.value), (24, 5));
        assert!(whole.to_string().contains("24 rows per step (6 on each of 4 ranks)"), "{whole}");
        let zero = [&full[..], &["train.zero_stage=1"]].concat();
        let (divided, alone) = (resolve_for(MODEL, 4, &zero).unwrap(), resolve(&zero).unwrap());
        let state = |plan: &Plan| plan.resident_state_bytes.value;
        assert_eq!((divided.zero_stage.value, alone.zero_stage.value), (1, 0));
        assert!(state(&divided) * 4 >= state(&whole) && state(&divided) * 3 < state(&whole), "{}", state(&divided));
        assert_eq!(state(&alone), state(&whole));
        let line =
            |plan: &Plan, what: &str| plan.memory.iter().find(|line| line.what == what).map_or(0, |line| line.bytes);
        let of_stage =
            |stage: u8| resolve_for(MODEL, 4, &[&full[..], &[&format!("train.zero_stage={stage}")]].concat());
        let (gradients, weights) = (of_stage(2).unwrap(), of_stage(3).unwrap());
        for plan in [&gradients, &weights] {
            assert_eq!(state(plan), state(&divided));
            assert!(line(plan, "gradients") * 3 < line(&whole, "gradients"));
            assert!(line(plan, "gradients for other ranks") > 0);
        }
        assert_eq!(line(&gradients, "trained weights"), line(&whole, "trained weights"));
        assert!(line(&weights, "trained weights") < line(&whole, "trained weights") / 2);
        assert!(line(&weights, "weights of other ranks") > 0);
        assert!(weights.to_string().contains("and the weights of the layers are divided over 4 ranks"), "{weights}");
    }

    #[test]
    #[cfg(feature = "flex")]
    fn every_decision_has_a_reason_and_plan_toml_has_them_all() {
        let plan = resolve(&["bnb_4bit={}", "train.micro_batch_size=2", "train.gradient_accumulation=3"]).unwrap();
        let saved: toml::Table = plan.to_toml().parse().unwrap();
        for (name, decision) in saved.iter().filter(|(name, _)| *name != "memory") {
            let reason = decision.get("reason").and_then(|reason| reason.as_str());
            assert!(reason.is_some_and(|reason| !reason.is_empty()), "{name} has no reason");
        }
        assert_eq!(saved["compute"]["value"].as_str(), Some("float32"));
        assert_eq!(saved["base"]["value"]["frozen"].as_str(), Some("nf4_double_quant"));
        assert_eq!((plan.steps.value, plan.warmup_steps.value, plan.rows_per_step()), (17, 1, 6));
        // A and B of rank 4: q and o 32 + 32 wide, k and v 32 + 16, gate, up and down 32 + 64, in two layers.
        assert_eq!(plan.trained_parameters.value, 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)));
        assert!(plan.to_string().contains("tokenizing threads"));
    }

    #[test]
    #[cfg(feature = "flex")]
    fn a_base_in_any_format_is_planned_with_its_bytes_and_named_with_its_key() {
        let planned = |format: &str| resolve(&[&format!("base={format}")]).unwrap();
        let projections = |plan: &Plan| plan.memory.iter().find(|line| line.what == "base weights").unwrap().bytes;
        for format in QuantFormat::ALL {
            let plan = planned(format.name());
            assert_eq!(plan.base.value, BaseStorage::Frozen(Format::Quantized(format)));
            assert!(plan.base.reason.starts_with("base: "), "{}", plan.base.reason);
        }
        // Two layers of 10,240 projection weights each: q, o, k and v, and three of 32 x 64.
        let [mxfp4, nvfp4, fp8] = ["mxfp4", "nvfp4", "fp8"].map(|format| projections(&planned(format)));
        let modules = 2 * 7;
        let values = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64);
        assert_eq!(nvfp4 - mxfp4, values / 16 - values / 32 + 4 * modules);
        let rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32);
        assert_eq!(fp8 - mxfp4, values - values / 2 - values / 32 + 4 * rows);
    }

    #[test]
    #[cfg(feature = "flex")]
    fn a_plan_is_everything_that_optimizer_and_schedule_need() {
        let plan =
            resolve(&["train.optimizer=adamw_8bit", "train.max_grad_norm=0", "train.steps=50", "lora=", "mode=full"])
                .unwrap();
        let optimizer = plan.optimizer_config();
        assert_eq!((optimizer.kind, optimizer.max_grad_norm), (OptimizerKind::AdamW8bit, None));
        let schedule = plan.learning_rate_schedule();
        assert_eq!((schedule.peak, schedule.warmup_steps, schedule.total_steps), (2e-5, 2, 50));
        assert_eq!((plan.base.value, plan.lora.value), (BaseStorage::Trained, None));
    }

    #[test]
    #[cfg(feature = "flex")]
    fn the_factors_of_longrope_follow_from_max_seq_len_alone() {
        let ones = ["1.0"; 4].join(", ");
        let lists = format!(r#""type": "longrope", "short_factor": [{ones}], "long_factor": [{ones}]"#);
        let model = MODEL.replace("LlamaForCausalLM", "Phi3ForCausalLM").replace("\"llama\"", "\"phi3\"").replace(
            "\"rope_theta\"",
            &format!(r#""original_max_position_embeddings": 64, "rope_scaling": {{{lists}}}, "rope_theta""#),
        );
        for (tokens, expected) in [(64, "short_factor"), (65, "long_factor")] {
            let plan = resolve_for(&model, 1, &[&format!("max_seq_len={tokens}"), "eval.max_new_tokens=32"]).unwrap();
            assert_eq!(plan.long_rope.as_ref().unwrap().value, expected);
            assert!(plan.to_string().contains(expected) && plan.to_toml().contains(expected));
        }
        assert!(resolve(&[]).unwrap().long_rope.is_none());
    }

    #[test]
    #[cfg(feature = "flex")]
    fn intervals_in_epochs_become_whole_steps_and_warmup_is_rounded_up() {
        let plan = resolve(&[
            "train.micro_batch_size=6",
            "train.log_every_epochs=0.001",
            "eval.every_epochs=0.5",
            "data.eval_fraction=0.1",
            "checkpoint.every_epochs=2",
            "train.steps=10",
            "train.warmup_ratio=0.03",
        ])
        .unwrap();
        let found = [plan.log_every, plan.eval_every_steps, plan.checkpoint_every_steps].map(|every| every.value);
        // 100 rows in steps of 6.
        assert_eq!((found, plan.warmup_steps.value), ([1, 8, 33], 1));
        let exact = resolve(&["train.steps=100", "train.warmup_ratio=0.07"]).unwrap();
        assert_eq!(exact.warmup_steps.value, 7, "0.07 x 100 is a little above 7 in floating point");
        assert_eq!(resolve(&["train.schedule=constant"]).unwrap().warmup_steps.value, 0);
    }

    #[test]
    #[cfg(feature = "flex")]
    fn a_lora_target_that_matches_nothing_is_refused_before_any_weight_is_read() {
        let message = resolve(&["lora.target=['q_projection']"]).unwrap_err().to_string();
        assert!(message.contains("q_projection"), "{message}");
    }
}
