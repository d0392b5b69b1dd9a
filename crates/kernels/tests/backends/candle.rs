//! The candle backend: every operation against the reference on burn-flex.

use burn_tensor::DType;
use firebrick_kernels::backends::Candle;
use firebrick_kernels::conformance::{Case, Extent, operations, products, verdict};

use crate::adamw_8bit;

#[test]
fn every_operation_equals_the_reference_on_flex() {
    let small = Case::small(DType::F32, 32);
    let odd = Case { documents: vec![1, 9, 30], hidden_size: 33, intermediate_size: 67, rank: 3, ..small.clone() };
    for case in [small.clone(), Case { window: Some(7), ..small }, odd] {
        let mut findings = operations::<Candle>(&case, &Default::default(), Extent::All);
        findings.extend(products::<Candle>(&case, &Default::default()));
        verdict(case.dtype, findings).unwrap_or_else(|problem| panic!("{case:?}: {problem}"));
    }
}

#[test]
fn steps_of_8_bit_adamw_equal_bitsandbytes_up_to_rounding() {
    adamw_8bit::assert_golden_steps::<Candle>();
}
