//! Compares the launches of steps, an evaluation and generation with a recording: over families, formats of weights, adapters, what layers save, and
//! formats of GEMMs. Two builds with the same launches compute the same on a card.
//!
//! `tests/golden/cuda-launches.txt` has a line per case: the number of launches, and the hash of their text. `recording.h` writes that text: kernels
//! with their grids and arguments, GEMMs, attention and copies, stream by stream, with allocations numbered as they appear. `UPDATE_GOLDEN=1 cargo
//! test -p firebrick-tests --features firebrick-tests/cuda --test null_cuda recorded` writes the file. Every run leaves the text of each case in
//! `launches`, in the target folder's `tmp`: copy it before a change, and `diff -r` shows the effect of the change.
//! Trade-off: not all combinations are cases, but enough to take each branch of the linear groups, and without `--slow` a sample of them is recorded.
//! Events are not written, so the order of streams among each other is not compared.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs, slice};

use burn_tensor::DType;
use burn_tensor::backend::Backend;
use firebrick_arch::LoraConfig;
use firebrick_data::Batch;
use firebrick_kernels::backends::cuda::{limit_shared_memory, planned_routes, take_routes, use_graphs};
use firebrick_kernels::backends::{BackendKind, Cuda};
use firebrick_kernels::{
    DividedBytes, EvaluationShape, GemmFormat, Recompute, RunShape, Session, TrainingShape, Weight, fp8_refusal,
};
use firebrick_model::{
    BaseStorage, BatchLimits, BuildOptions, Decoder, GenerateOptions, ModelConfig, PassOptions, Sampler,
};
use firebrick_precision::{FloatType, Format, QuantFormat};
use firebrick_tests::{
    FAMILIES, FROZEN, MIXTURES, NF4, POSITIONS, TRAINED, fixture, golden_file, is_slow, packed, trainer_of, upload,
};
use serde_json::{Value, json};

use crate::{CAPABILITY, LAUNCHES};

/// Compute capabilities of the cards.
pub(crate) const CAPABILITIES: [&str; 3] = ["9.0", "8.9", "12.0"];

/// A run whose launches are recorded.
#[derive(Clone)]
struct Case {
    family: &'static str,
    /// Hidden size, and that of the MLP or of an expert.
    sizes: [usize; 2],
    base: BaseStorage,
    lora: Lora,
    compute: DType,
    gemms: GemmFormat,
    recompute: Recompute,
    offload: bool,
    /// Maximum bytes of converted weights kept in each pass.
    kept: u64,
    /// Shared memory per block, if less than the card's.
    shared_bytes: Option<usize>,
}

/// Adapters of rank 8 on all linear modules of a Llama in NF4: appended, and of a rank that the adapter passes support.
const PLAIN: Case = Case {
    family: "tiny-llama",
    sizes: [256, 512],
    base: NF4,
    lora: R8,
    compute: DType::BF16,
    gemms: GemmFormat::Compute,
    recompute: Recompute::Selective,
    offload: false,
    kept: 0,
    shared_bytes: None,
};

/// Room to keep all weights.
const EVERY_BYTE: u64 = 1 << 30;

/// A name, and section `[lora]` in JSON.
type Lora = (&'static str, &'static str);

const NONE: Lora = ("", "");
const R8: Lora = ("r8", r#"{"r": 8}"#);
/// Separate in every group.
const R64: Lora = ("r64", r#"{"r": 64}"#);
/// A rank that no adapter pass supports.
const R4: Lora = ("r4", r#"{"r": 4}"#);
const DROPOUT: Lora = ("dropout", r#"{"r": 8, "dropout": 0.1}"#);
const DORA: Lora = ("dora", r#"{"r": 8, "use_dora": true}"#);
const DORA_DROPOUT: Lora = ("dora-dropout", r#"{"r": 8, "use_dora": true, "dropout": 0.1}"#);
/// Adapters on experts too.
const EXPERTS: Lora =
    ("experts", r#"{"r": 8, "target": ".*(q_proj|o_proj|out_proj|w1|w2|w3|gate_proj|up_proj|down_proj)"}"#);
const EXPERTS_DROPOUT: Lora =
    ("experts-dropout", r#"{"r": 8, "dropout": 0.1, "target": ".*(q_proj|w1|w2|w3|up_proj|down_proj)"}"#);
/// Adapters on the parameters of experts.
const PARAMETERS: Lora = (
    "parameters",
    r#"{"r": 8, "target": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}"#,
);
/// Adapters on one of them.
const PARAMETER: Lora = ("parameter", r#"{"r": 8, "target": [], "target_parameters": ["experts.gate_up_proj"]}"#);

const ADAPTERS: [Lora; 18] = [
    R8,
    R4,
    R64,
    // Appended but for queries, keys and values.
    ("r16", r#"{"r": 16}"#),
    // The larger tile of the passes.
    ("r32", r#"{"r": 32}"#),
    ("r8-of-q-and-v", r#"{"r": 8, "target": ["q_proj", "v_proj"]}"#),
    ("r8-of-o-and-up", r#"{"r": 8, "target": ["o_proj", "up_proj"]}"#),
    ("r8-of-gate-and-up", r#"{"r": 8, "target": ["gate_proj", "up_proj"]}"#),
    ("r8-of-up-and-down", r#"{"r": 8, "target": ["up_proj", "down_proj"]}"#),
    ("r8-24", r#"{"r": 8, "rank_pattern": {"gate_proj": 24}}"#),
    ("r8-16-32", r#"{"r": 8, "rank_pattern": {"k_proj": 16, "down_proj": 32}}"#),
    ("r8-next-to-trained", r#"{"r": 8, "modules_to_save": ["v_proj", "down_proj"]}"#),
    DROPOUT,
    ("r64-dropout", r#"{"r": 64, "dropout": 0.1}"#),
    DORA,
    ("dora-of-q-and-v", r#"{"r": 8, "use_dora": true, "target": ["q_proj", "v_proj"]}"#),
    ("r64-dora", r#"{"r": 64, "use_dora": true}"#),
    DORA_DROPOUT,
];

const fn quantized(format: QuantFormat) -> BaseStorage {
    BaseStorage::Frozen(Format::Quantized(format))
}

/// Lists the cases of one family: formats of weights and GEMMs, adapters, what layers save, and kept weights.
fn cases_of_one_family() -> Vec<Case> {
    let mut cases = Vec::new();
    for gemms in [GemmFormat::Compute, GemmFormat::Fp8] {
        for lora in ADAPTERS {
            // The plan refuses 8-bit GEMMs under magnitudes.
            if gemms == GemmFormat::Compute || !lora.0.contains("dora") {
                cases.extend([NF4, FROZEN].map(|base| Case { base, lora, gemms, ..PLAIN }));
            }
        }
        let formats =
            [QuantFormat::Nf4 { double_quant: false }, QuantFormat::Nvfp4, QuantFormat::Mxfp4, QuantFormat::Fp8];
        cases.extend(formats.map(|format| Case { base: quantized(format), gemms, ..PLAIN }));
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Projections, Recompute::Full] {
            cases.push(Case { base: TRAINED, lora: NONE, gemms, recompute, ..PLAIN });
        }
        for recompute in [Recompute::None, Recompute::Projections, Recompute::Full] {
            for lora in [R8, R4, R64, DROPOUT, DORA, DORA_DROPOUT] {
                if gemms == GemmFormat::Compute || !lora.0.contains("dora") {
                    cases.push(Case { lora, gemms, recompute, ..PLAIN });
                }
            }
        }
        for kept in [1 << 18, EVERY_BYTE] {
            cases.extend([R8, R64, DROPOUT].map(|lora| Case { lora, gemms, kept, ..PLAIN }));
        }
    }
    let offload = |recompute| Case { recompute, offload: true, ..PLAIN };
    cases.extend([Recompute::Projections, Recompute::Full].map(offload));
    for compute in [DType::F32, DType::F16] {
        for (base, lora) in [(NF4, R8), (FROZEN, R64), (TRAINED, NONE), (NF4, DROPOUT), (FROZEN, DORA)] {
            cases.push(Case { base, lora, compute, ..PLAIN });
        }
    }
    // This is enough for attention, and too little for the adapter passes.
    cases.push(Case { shared_bytes: Some(72 << 10), ..PLAIN });
    // Rows that are no whole vectors.
    for (base, lora) in [(NF4, R8), (FROZEN, R8), (TRAINED, NONE)] {
        cases.push(Case { base, lora, sizes: [256, 514], ..PLAIN });
    }
    // Rows of codes that no block can keep.
    cases.push(Case { gemms: GemmFormat::Fp8, sizes: [256, 16_416], ..PLAIN });
    cases
}

/// Returns whether all widths of a model fit 8-bit floats; gates of four heads do not.
fn takes_fp8(family: &str) -> bool {
    fp8_refusal(&ModelConfig::read(&fixture(family)).expect("the model has a readable config").spec).is_none()
}

/// Returns whether a family's launches are the same in every run: not where Burn makes tensors in memory that CubeCL chooses, and finds that of earlier
/// ones free or not yet: Gated DeltaNet, and with more layers the wide heads of Gemma 4.
fn is_repeatable(family: &&str) -> bool {
    let others = ["tiny-olmo-hybrid", "tiny-qwen3-next", "tiny-gemma4-vl", "tiny-gemma4-unified-vl"];
    !family.starts_with("tiny-qwen3-5") && !others.contains(family)
}

/// Lists the cases of the other families.
fn cases_of_families() -> Vec<Case> {
    let mut cases = Vec::new();
    let others = FAMILIES.into_iter().filter(|family| !MIXTURES.contains(family) && *family != PLAIN.family);
    for family in others.filter(is_repeatable) {
        for recompute in [Recompute::None, Recompute::Projections, Recompute::Full] {
            cases.push(Case { family, recompute, ..PLAIN });
        }
        cases.push(Case { family, base: TRAINED, lora: NONE, ..PLAIN });
        if takes_fp8(family) {
            cases.push(Case { family, gemms: GemmFormat::Fp8, ..PLAIN });
        }
        cases.push(Case { family, lora: DORA, ..PLAIN });
    }
    cases.extend([R64, DROPOUT].map(|lora| Case { family: "tiny-llama-bias", lora, ..PLAIN }));
    for family in MIXTURES.into_iter().filter(is_repeatable) {
        // The experts of gpt-oss and of Gemma 4 are parameters alone.
        let [experts, other] = if ["tiny-gpt-oss", "tiny-gemma4-moe"].contains(&family) {
            [PARAMETERS, PARAMETER]
        } else {
            [EXPERTS, EXPERTS_DROPOUT]
        };
        for (base, lora) in [(NF4, experts), (FROZEN, experts), (NF4, other), (NF4, R8), (TRAINED, NONE)] {
            cases.push(Case { family, base, lora, ..PLAIN });
        }
        cases.push(Case { family, lora: experts, recompute: Recompute::Full, ..PLAIN });
        if takes_fp8(family) {
            cases.push(Case { family, lora: experts, gemms: GemmFormat::Fp8, ..PLAIN });
            cases.push(Case { family, base: TRAINED, lora: NONE, gemms: GemmFormat::Fp8, ..PLAIN });
        }
    }
    cases.push(Case { family: "tiny-qwen3-moe", lora: PARAMETERS, ..PLAIN });
    cases
}

/// Lists cases of cards whose GEMMs take the scales of 8-bit rows differently, and whose blocks have less shared memory.
fn cases_of_other_cards() -> Vec<Case> {
    let adapters = [(NF4, R8), (NF4, DROPOUT), (FROZEN, R64), (TRAINED, NONE)];
    let mut cases = vec![PLAIN];
    cases.extend(adapters.map(|(base, lora)| Case { base, lora, gemms: GemmFormat::Fp8, ..PLAIN }));
    cases
}

/// Returns the folder for the launches of a card with this compute capability.
fn folder(capability: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("launches").join(capability)
}

/// Returns whether every case is recorded, as it must be for the golden file.
fn takes_every_case() -> bool {
    is_slow() || env::var_os("UPDATE_GOLDEN").is_some()
}

/// Writes the launches of each case on the card that this process sees.
pub(crate) fn record() {
    BackendKind::Cuda.probe().expect("the libraries are found");
    use_graphs(&Default::default(), false);
    let capability = env::var(CAPABILITY).expect("the caller names the card");
    let folder = folder(&capability);
    _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    // Lists repeat after two, six and eight cases: none of these steps takes the same of each.
    let of = |cases: Vec<Case>, step| cases.into_iter().step_by(if takes_every_case() { 1 } else { step });
    let cases: Vec<Case> = match capability == CAPABILITIES[0] {
        true => of(cases_of_one_family(), 3).chain(of(cases_of_families(), 5)).collect(),
        false => cases_of_other_cards(),
    };
    for case in cases {
        let file = folder.join(case.name());
        assert!(!file.exists(), "{} is there twice", case.name());
        fs::write(file, case.text()).unwrap();
    }
}

/// Compares the output of [`record`] with the golden file.
pub(crate) fn compare() {
    let mut found = String::new();
    for capability in CAPABILITIES {
        let files = fs::read_dir(folder(capability)).unwrap().map(|file| file.unwrap().path());
        for file in files.collect::<BTreeSet<_>>() {
            let text = fs::read_to_string(&file).unwrap();
            let launches = text.lines().filter(|line| !line.starts_with('#')).count();
            let name = file.file_name().expect("a file has a name").display();
            writeln!(found, "{capability}/{name}: {launches} launches, {:016x}", fnv(text.as_bytes())).unwrap();
        }
    }
    let golden = golden_file("cuda-launches.txt");
    if env::var_os("UPDATE_GOLDEN").is_some() {
        return fs::write(golden, found).unwrap();
    }
    let expected = fs::read_to_string(&golden).unwrap_or_default();
    let name = |line: &str| line.split(':').next().unwrap_or_default().to_owned();
    let recorded: BTreeSet<String> = found.lines().map(name).collect();
    let is_compared = |line: &&str| takes_every_case() || recorded.contains(&name(line));
    let expected: BTreeSet<&str> = expected.lines().filter(is_compared).collect();
    let differ: Vec<_> = expected.symmetric_difference(&found.lines().collect()).copied().collect();
    assert!(
        differ.is_empty(),
        "cases launch something else than was recorded. Their launches are in {}: compare them with those of a build before the change \
         (`diff -r`), and write the golden file again with UPDATE_GOLDEN=1 if they should differ:\n{}",
        folder("").display(),
        differ.join("\n")
    );
}

/// Hashes bytes with FNV-1a.
fn fnv(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

impl Case {
    fn name(&self) -> String {
        let base = match self.base {
            BaseStorage::Trained => "trained",
            BaseStorage::TrainedBf16 => "trained bf16",
            BaseStorage::Frozen(Format::Quantized(format)) => format.name(),
            BaseStorage::Frozen(_) => "dense",
        };
        let Self { family, lora: (lora, _), compute, gemms, recompute, .. } = self;
        let mut name = format!("{family} {base} {lora} {compute:?} {gemms:?} {recompute:?}");
        if self.offload {
            name += " offloaded";
        }
        if self.kept > 0 {
            write!(name, " kept {}", self.kept).unwrap();
        }
        if let Some(bytes) = self.shared_bytes {
            write!(name, " shared {bytes}").unwrap();
        }
        if self.sizes != PLAIN.sizes {
            write!(name, " {} wide", self.sizes[1]).unwrap();
        }
        name.to_lowercase().replace("  ", " ").replace(' ', "_")
    }

    /// Builds the config of the family's fixture in other sizes.
    fn config(&self) -> ModelConfig {
        let path = fixture(self.family).join("config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let [hidden, inner] = self.sizes;
        let changes = [
            ("hidden_size", json!(hidden)),
            ("intermediate_size", json!(inner)),
            ("moe_intermediate_size", json!(inner)),
            ("head_dim", json!(hidden / 4)),
            ("global_head_dim", json!(hidden / 2)),
            ("rope_scaling", Value::Null),
        ];
        for (key, value) in changes {
            if config.get(key).is_some_and(|old| !old.is_null()) {
                config[key] = value;
            }
        }
        let of_layers = config.get_mut("per_layer_config").and_then(Value::as_object_mut);
        of_layers.into_iter().flat_map(|layers| layers.values_mut()).for_each(|of| of["head_dim"] = json!(hidden / 2));
        ModelConfig::parse(&config.to_string(), &path).expect("only sizes changed")
    }

    fn lora(&self) -> Option<LoraConfig> {
        (self.lora != NONE).then(|| serde_json::from_str(self.lora.1).unwrap())
    }

    fn model(&self) -> Decoder<Cuda> {
        let lora = self.lora();
        let config = self.config().for_adapter(lora.as_ref());
        let options = BuildOptions::new(self.base, self.compute, POSITIONS);
        let options = BuildOptions { lora, gemms: self.gemms, ..options };
        let mut model = Decoder::random(config, &options, None, &Default::default()).expect("it is built");
        model.refresh_adapter();
        model
    }

    /// Compares the routes of the groups that ran, and the bytes of their weights, with those that the plan counts with.
    fn compare_with_plan(&self, model: &Decoder<Cuda>, shared_bytes: usize) {
        let (spec, ran) = (&model.config.spec, take_routes());
        let training = TrainingShape {
            base: self.base,
            dense: BTreeSet::new(),
            lora: self.lora(),
            compute: match self.compute {
                DType::BF16 => FloatType::Bf16,
                DType::F16 => FloatType::F16,
                _ => FloatType::F32,
            },
            gemms: self.gemms,
            gradients: FloatType::F32,
            shared_bytes,
            has_wgmma: env::var(CAPABILITY).is_ok_and(|capability| capability == "9.0"),
            kept_bytes: [0; 2],
            optimizer_bytes: 0,
            paged_bytes: 0,
            paging_bytes: 0,
            micro_batch_size: 1,
            row_len: POSITIONS,
            longest_document: POSITIONS,
            documents: 1,
            recompute: self.recompute,
            offload: self.offload,
            loss_tokens_per_row: POSITIONS,
            loss_chunk_tokens: POSITIONS,
            evaluation: EvaluationShape::default(),
            divided: DividedBytes::default(),
            pairs: None,
            deterministic: false,
        };
        for route in planned_routes(spec, &training) {
            assert!(ran.contains(&route), "{}: planned {route}\nran {ran:#?}", self.name());
        }
        let tensors = spec.stacked_tensors();
        let linears = model.layers().iter().flat_map(|layer| layer.linears());
        for linear in linears.filter(|linear| linear.base.trained().is_none()) {
            let bytes = match linear.base.weight() {
                Weight::Dense(values) => values.shape().num_elements() * values.dtype().size(),
                Weight::Quantized(weight) => weight.bytes(),
            };
            let tensor =
                tensors.iter().find(|tensor| tensor.name == format!("{}.weight", linear.path)).expect("it is listed");
            assert_eq!(training.storage().bytes(spec, tensor), bytes as u64, "{}: {}", self.name(), tensor.name);
        }
    }

    /// Records two steps, the first of which has two micro-batches, an evaluation, a forward pass without adapters (the reference of preference
    /// losses), and generation.
    fn text(&self) -> String {
        let device = Default::default();
        Cuda::release_memory(&device);
        Cuda::open(&device, &RunShape { kept_bytes: [self.kept; 2], ..RunShape::default() });
        let shared_bytes = limit_shared_memory(&device, self.shared_bytes);
        let pass = PassOptions { recompute: self.recompute, offload: self.offload, ..PassOptions::default() };
        let mut trainer = trainer_of(self.model(), pass);
        trainer.settings.dropout_seed = Some(1);
        take_routes();
        let [mixed, equal] = [documents([39, 29, 61]), documents([48, 48, 48])];
        let mut text = Text::default();
        text.record("two micro-batches", || _ = trainer.step(&[mixed.clone(), equal]).unwrap().read());
        text.record("a step", || _ = trainer.step(slice::from_ref(&mixed)).unwrap().read());
        let model = &trainer.model;
        let spec = &model.config.spec;
        self.compare_with_plan(model, shared_bytes);
        let batch = upload(model, &mixed);
        text.record("evaluation", || _ = model.score(&batch, 20).loss_sum.into_data());
        let base = PassOptions { adapters: false, ..PassOptions::default() };
        text.record("without adapters", || _ = Cuda::section(&device, || model.forward(&batch, base)));
        let options = GenerateOptions {
            max_new_tokens: 2,
            stop_tokens: Vec::new(),
            sampler: Sampler::greedy(),
            limits: BatchLimits::NONE,
        };
        // More rows than the few-row kernels take where weights are kept.
        let prompts: Vec<Vec<u32>> =
            (1..=if self.kept > 0 { 18 } else { 2 }).map(|last| (1..=4 + last).collect()).collect();
        let others = text.text.len();
        text.record("generation", || _ = model.generate(&prompts, &options).unwrap());
        if self.kept == EVERY_BYTE && self.lora.0 == R8.0 && self.gemms == GemmFormat::Compute {
            let groups: usize = (0..spec.layers.len()).map(|layer| spec.groups(layer).len()).sum();
            assert_eq!(
                text.text[others..].matches("write_adapters").count(),
                groups,
                "adapters are written once per text"
            );
        }
        limit_shared_memory(&device, None);
        Cuda::open(&device, &RunShape::default());
        text.text
    }
}

fn documents(lengths: [u32; 3]) -> Batch {
    let documents: [Vec<u32>; 3] = lengths.map(|length| (1..=length).collect());
    packed(&documents.each_ref().map(Vec::as_slice))
}

/// The launches so far.
#[derive(Default)]
struct Text {
    text: String,
    /// Allocations in the order of their appearance.
    allocations: HashMap<String, usize>,
}

impl Text {
    /// Adds the launches of `work`, stream by stream: the engine's, then those that copy to and from the host.
    fn record(&mut self, name: &str, work: impl FnOnce()) {
        let file = PathBuf::from(env::var_os(LAUNCHES).expect("the caller names the file"));
        Cuda::sync(&Default::default()).expect("nothing fails here");
        fs::File::create(&file).unwrap();
        work();
        Cuda::sync(&Default::default()).expect("nothing fails here");
        let lines = fs::read_to_string(&file).unwrap();
        let mut streams: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for line in lines.lines() {
            let (stream, launch) = line.split_once(' ').expect("a stream and a launch");
            streams.entry(stream).or_default().push(launch);
        }
        let mut streams: Vec<_> = streams.into_values().map(|launches| (kind_of(&launches), launches)).collect();
        streams.sort();
        for (kind, launches) in streams {
            writeln!(self.text, "# {name}, {kind:?}").unwrap();
            launches.into_iter().for_each(|launch| self.add(launch));
        }
    }

    /// Adds a launch with its allocations renumbered.
    fn add(&mut self, launch: &str) {
        for word in launch.split(' ') {
            let known = self.allocations.len();
            match word.strip_prefix('@').and_then(|address| address.split_once('/')) {
                Some((number, place)) => {
                    let number = *self.allocations.entry(number.to_owned()).or_insert(known);
                    write!(self.text, "@{number}/{place} ").unwrap();
                }
                None => write!(self.text, "{word} ").unwrap(),
            }
        }
        self.text.truncate(self.text.len() - 1);
        self.text.push('\n');
    }
}

/// The purpose of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Engine,
    ToDevice,
    ToHost,
    Burn,
}

fn kind_of(launches: &[&str]) -> Kind {
    let has = |word: &str| launches.iter().any(|launch| launch.starts_with(word));
    match () {
        () if has("burn") => Kind::Burn,
        () if has("kernel") => Kind::Engine,
        () if has("to device") => Kind::ToDevice,
        () => Kind::ToHost,
    }
}
