//! Learning from rewards as a program: on two ranks, and killed by a process that gives rewards.

use std::fs;

use serde_json::Value;

use super::{LORA, Place, assert_ranks_equal_one_rank_in, numbers, succeeded};

/// A process that gives rewards by number, and ends the program where its argument is requested, once. A thread may write the checkpoint for longer than two
/// steps take, so it is waited for.
const REWARD: &str = r#"echo '{"firebrick_reward": 1, "batch": false}'
while read -r line; do
    id=${line#*:}; id=${id%%,*}
    if [ "$id" = "$1" ] && mkdir killed; then
        until [ -d runs/killed/checkpoints/step-3 ]; do sleep 0.1; done
        kill -9 $PPID; exit
    fi
    echo "{\"id\": $id, \"reward\": $((id * 7 % 5))}"
done"#;
const PROMPTS: [&str; 5] = [
    "grpo.num_generations=2",
    "grpo.max_completion_length=8",
    "grpo.scale_rewards=batch",
    "max_seq_len=128",
    "eval.exact_match_prompts=0",
];

/// Completions have the same number, and so the same random stream, on any rank; each rank asks for the rewards of its own.
#[test]
fn ranks_learn_from_rewards_as_one_rank_with_all_completions() {
    let here = Place::new();
    fs::write(here.folder.path().join("reward.sh"), REWARD).unwrap();
    // Adam divides an almost zero gradient and its rounding by itself, as for pairs.
    let kind = [LORA, &PROMPTS, &["grpo.rewards=[{command=['sh', 'reward.sh']}]", "train.learning_rate=1e-5"]].concat();
    assert_ranks_equal_one_rank_in(&here, &kind, &[("2", 2)]);
    let rollouts = |run: &str, step: usize, rank: usize| -> Vec<Value> {
        let file = here.run(run).join(format!("rounds/step-{step:08}-rank-{rank}.jsonl"));
        fs::read_to_string(file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    for step in 1..=6 {
        let (one, two) = (rollouts("one", step, 0), [0, 1].map(|rank| rollouts("ranks-2", step, rank)));
        for group in two.iter().flat_map(|of_rank| of_rank.chunks(2)) {
            assert!(group.len() == 2 && group[0]["document"] == group[1]["document"], "step {step}: {group:?}");
        }
        let two = two.concat();
        assert_eq!(two.len(), 4);
        for (two, one) in two.iter().zip(&one) {
            for key in ["id", "document", "tokens", "reward", "advantage"] {
                assert_eq!(two[key], one[key], "step {step}: {key}");
            }
        }
    }
}

#[test]
fn a_program_that_is_killed_while_it_waits_for_a_reward_goes_on_to_the_same_end() {
    let here = Place::new();
    fs::write(here.folder.path().join("reward.sh"), REWARD).unwrap();
    let changes = |name: &'static str, reward: &'static str| {
        [LORA, &PROMPTS, &[name, reward, "train.gradient_accumulation=4"]].concat()
    };
    succeeded(&here.program(&changes("name=whole", "grpo.rewards=[{command=['sh', 'reward.sh']}]")).output().unwrap());
    // In the fifth step; the third is saved.
    let killed = changes("name=killed", "grpo.rewards=[{command=['sh', 'reward.sh', '17']}]");
    assert_eq!(here.program(&killed).output().unwrap().status.code(), None, "a signal ended it");
    let printed = succeeded(&here.program(&killed).arg("--resume").output().unwrap());
    assert!(printed.contains("resumed after step 3"), "{printed}");
    for file in ["adapter/adapter_model.safetensors", "optimizer.safetensors"] {
        let bytes = |run: &str| fs::read(here.run(run).join("checkpoints/step-6").join(file)).unwrap();
        assert!(bytes("killed") == bytes("whole"), "{file} differs");
    }
    assert_eq!(numbers(&here.run("killed")), numbers(&here.run("whole")));
}
