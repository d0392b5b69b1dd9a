//! The flex backend: 8-bit AdamW against bitsandbytes. Its other operations are compared with their reference bodies next to them.

use firebrick_kernels::backends::Flex;

use crate::adamw_8bit;

#[test]
fn steps_of_8_bit_adamw_equal_bitsandbytes_up_to_rounding() {
    adamw_8bit::assert_golden_steps::<Flex>();
}
