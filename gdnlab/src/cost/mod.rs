//! What a computation costs: FLOPs and bytes by formula, and the time that a machine's rates allow for them.
//!
//! A multiply-add counts as two FLOPs. Products count as whole matrices, also where half of one is zero, because tensor
//! cores compute them so; causal attention alone counts half of its scores, as is the custom. What is done element by
//! element (decays, gates, casts, sums) is not counted.

pub mod attention;
pub mod chinchilla;
pub mod gdn;
pub mod gdn2;
pub mod memory;
pub mod model;
#[cfg(test)]
mod published;

/// Arithmetic and traffic of one call, or of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations in products.
    pub flop: f64,
    /// Bytes that cross the memory of the device, each once per reading or writing.
    pub bytes: f64,
}

/// Rates that a machine reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes per second of a large copy, read and written together.
    pub copy_bytes_per_s: f64,
    /// FLOPs per second of a large product in the format of the call's products; `None` where nobody knows it, and then
    /// only traffic counts.
    pub matmul_flop_per_s: Option<f64>,
}

impl Rates {
    /// The ridge point: the arithmetic intensity, in FLOPs per byte, above which products take longer than traffic. `None`
    /// where the rate of products is not known.
    pub fn ridge_flop_per_byte(&self) -> Option<f64> {
        Some(self.matmul_flop_per_s? / self.copy_bytes_per_s)
    }
}

impl Cost {
    /// Arithmetic intensity in FLOPs per byte.
    pub fn intensity_flop_per_byte(&self) -> f64 {
        self.flop / self.bytes
    }

    /// Arithmetic intensity over the [ridge point](Rates::ridge_flop_per_byte): above 1 the products bound the time, below
    /// 1 the traffic. `None` where the rate of products is not known.
    pub fn intensity_over_ridge(&self, rates: &Rates) -> Option<f64> {
        Some(self.intensity_flop_per_byte() / rates.ridge_flop_per_byte()?)
    }

    /// The time in milliseconds that no implementation goes below: traffic or products, whichever takes longer. The two
    /// overlap at best.
    pub fn floor_ms(&self, rates: &Rates) -> f64 {
        let products = rates.matmul_flop_per_s.map_or(0.0, |rate| self.flop / rate);
        1e3 * products.max(self.bytes / rates.copy_bytes_per_s)
    }

    /// Gigabytes per second of a call that takes `latency_ms`.
    pub fn gb_s(&self, latency_ms: f64) -> f64 {
        self.bytes / latency_ms / 1e6
    }

    /// TFLOP/s of a call that takes `latency_ms`.
    pub fn tflop_s(&self, latency_ms: f64) -> f64 {
        self.flop / latency_ms / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_longer_of_the_two_times() {
        let cost = Cost { flop: 8e12, bytes: 4e9 };
        let rates = Rates { copy_bytes_per_s: 4e12, matmul_flop_per_s: Some(800e12) };
        assert!((cost.floor_ms(&rates) - 10.0).abs() < 1e-12);
        let slow_memory = Rates { copy_bytes_per_s: 0.2e12, ..rates };
        assert!((cost.floor_ms(&slow_memory) - 20.0).abs() < 1e-12);
        let unknown = Rates { matmul_flop_per_s: None, ..rates };
        assert!((cost.floor_ms(&unknown) - 1.0).abs() < 1e-12);
    }

    /// Above the ridge point the products take longer than the traffic.
    #[test]
    fn the_ridge_point_parts_products_from_traffic() {
        let rates = Rates { copy_bytes_per_s: 4e12, matmul_flop_per_s: Some(800e12) };
        assert_eq!(rates.ridge_flop_per_byte(), Some(200.0));
        let cost = Cost { flop: 500.0, bytes: 2.0 };
        assert_eq!((cost.intensity_flop_per_byte(), cost.intensity_over_ridge(&rates)), (250.0, Some(1.25)));
        let unknown = Rates { matmul_flop_per_s: None, ..rates };
        assert_eq!((unknown.ridge_flop_per_byte(), cost.intensity_over_ridge(&unknown)), (None, None));
    }

    #[test]
    fn rates_are_in_their_units() {
        let cost = Cost { flop: 4e12, bytes: 3e9 };
        assert!((cost.gb_s(2.0) - 1500.0).abs() < 1e-9);
        assert!((cost.tflop_s(2.0) - 2000.0).abs() < 1e-9);
    }
}
