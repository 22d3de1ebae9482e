//! What vendors say that their GPUs reach.

use super::Products;

/// What the vendor says that a GPU reaches. Products are dense, and those of 16-bit operands have sums in binary32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DataSheet {
    /// The name that the driver gives the GPU, without the vendor's.
    pub gpu: &'static str,
    /// Memory bandwidth in GB/s.
    pub memory_gb_s: f64,
    /// Products of bf16 or fp16 operands in TFLOP/s.
    pub bf16_tflop_s: f64,
    /// Products of TF32 operands in TFLOP/s, where somebody says so.
    pub tf32_tflop_s: Option<f64>,
    /// Binary32 outside of the tensor cores in TFLOP/s.
    pub fp32_tflop_s: f64,
    /// Binary64 in TFLOP/s, on the tensor cores where they have it, where somebody says so.
    pub fp64_tflop_s: Option<f64>,
    /// Where the numbers stand.
    pub source: &'static str,
}

/// One row: name, GB/s, then TFLOP/s in bf16, TF32, binary32 and binary64, 0 where nobody says.
const fn sheet(gpu: &'static str, memory_gb_s: f64, tflop_s: [f64; 4], source: &'static str) -> DataSheet {
    const fn known(rate: f64) -> Option<f64> {
        if rate > 0.0 { Some(rate) } else { None }
    }
    let [bf16_tflop_s, tf32, fp32_tflop_s, fp64] = tflop_s;
    let (tf32_tflop_s, fp64_tflop_s) = (known(tf32), known(fp64));
    DataSheet { gpu, memory_gb_s, bf16_tflop_s, tf32_tflop_s, fp32_tflop_s, fp64_tflop_s, source }
}

/// Data sheets of Hopper print rates with sparsity, which are twice these. White papers of GeForce cards print them with
/// sums in binary32 beside those with sums in fp16; their binary64 is a 64th of binary32, which the papers say in words.
#[rustfmt::skip]
const DATA_SHEETS: [DataSheet; 13] = [
    sheet("H200", 4800.0, [989.5, 494.5, 67.0, 67.0], "NVIDIA H200 data sheet, SXM, without sparsity"),
    sheet("H200 NVL", 4800.0, [835.5, 417.5, 60.0, 60.0], "NVIDIA H200 data sheet, NVL, without sparsity"),
    sheet("H100 80GB HBM3", 3350.0, [989.5, 494.5, 67.0, 67.0], "NVIDIA H100 data sheet, SXM, without sparsity"),
    sheet("H100 NVL", 3900.0, [835.5, 417.5, 60.0, 60.0], "NVIDIA H100 data sheet, NVL, without sparsity"),
    sheet("H100 PCIe", 2000.0, [756.5, 378.0, 51.0, 51.0], "NVIDIA H100 data sheet of 2022, PCIe, without sparsity"),
    sheet("A100-SXM4-80GB", 2039.0, [312.0, 156.0, 19.5, 19.5], "NVIDIA A100 data sheet"),
    sheet("A100 80GB PCIe", 1935.0, [312.0, 156.0, 19.5, 19.5], "NVIDIA A100 data sheet"),
    sheet("A100-SXM4-40GB", 1555.0, [312.0, 156.0, 19.5, 19.5], "NVIDIA A100 data sheet of 2020"),
    sheet("A100-PCIE-40GB", 1555.0, [312.0, 156.0, 19.5, 19.5], "NVIDIA A100 data sheet of 2020"),
    sheet("B200", 8000.0, [2250.0, 1100.0, 80.0, 40.0],
          "NVIDIA Blackwell architecture technical brief, HGX B200 at 1,000 W, without sparsity"),
    sheet("GB10", 273.0, [118.8, 0.0, 31.0, 0.0],
          "NVIDIA DGX Spark data sheet (bandwidth), the post Research Sprint Day 2 (bf16), and NVIDIA's talk at Hot Chips 2025 (fp32)"),
    sheet("GeForce RTX 4090", 1008.0, [165.2, 82.6, 82.6, 1.29], "NVIDIA Ada GPU architecture white paper, appendix"),
    sheet("GeForce RTX 5090", 1792.0, [209.5, 104.8, 104.8, 1.64],
          "NVIDIA RTX Blackwell GPU architecture white paper, appendix"),
];

impl DataSheet {
    /// The one of the GPU to which the driver gives this name. A part of a GPU, or its version for notebooks, has another
    /// name and other rates, and so none.
    pub fn of(gpu: &str) -> Option<&'static Self> {
        let name = gpu.strip_prefix("NVIDIA ").unwrap_or(gpu);
        DATA_SHEETS.iter().find(|sheet| sheet.gpu == name)
    }

    /// The rate of `products` in TFLOP/s, where somebody says it.
    pub fn matmul_tflop_s(&self, products: Products) -> Option<f64> {
        match products {
            Products::Bf16 | Products::Fp16 => Some(self.bf16_tflop_s),
            Products::Tf32 => self.tf32_tflop_s,
            Products::Fp32 => Some(self.fp32_tflop_s),
            Products::Fp64 => self.fp64_tflop_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::read_csv;
    use gdnlab_deps::polars::prelude::DataType;

    #[test]
    fn a_data_sheet_is_found_by_the_whole_name_of_the_gpu() {
        assert_eq!(DataSheet::of("NVIDIA H200").unwrap().bf16_tflop_s, 989.5);
        assert_eq!(DataSheet::of("NVIDIA H200 NVL").unwrap().bf16_tflop_s, 835.5);
        assert_eq!(DataSheet::of("NVIDIA A100-SXM4-40GB").unwrap().memory_gb_s, 1555.0);
        for other in ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 MIG 1g.18gb", "NVIDIA B2", "Intel Arc", ""] {
            assert_eq!(DataSheet::of(other), None, "{other}");
        }
    }

    /// Tensor cores halve their rate from 16 bits to TF32, and no rate grows with the precision.
    #[test]
    fn the_rates_of_a_data_sheet_fit_each_other() {
        for sheet in &DATA_SHEETS {
            let rates = [Products::Bf16, Products::Tf32, Products::Fp32, Products::Fp64];
            let rates: Vec<f64> = rates.iter().filter_map(|&products| sheet.matmul_tflop_s(products)).collect();
            assert!(rates.windows(2).all(|pair| pair[0] >= pair[1]), "{sheet:?}");
            if let Some(tf32) = sheet.tf32_tflop_s {
                assert!((sheet.bf16_tflop_s / tf32 - 2.0).abs() < 0.06, "{sheet:?}");
            }
            assert_eq!(DATA_SHEETS.iter().filter(|other| other.gpu == sheet.gpu).count(), 1, "{}", sheet.gpu);
            assert!(!sheet.source.is_empty());
        }
    }

    #[test]
    fn the_published_theoretical_rates_of_a_gb10_are_in_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published/day02_gb10_roofline.csv");
        let columns = [("quantity", DataType::String), ("theoretical", DataType::Float64)];
        let table = read_csv(path, &columns).unwrap();
        let rates: Vec<f64> = table.column("theoretical").unwrap().f64().unwrap().iter().flatten().collect();
        let sheet = DataSheet::of("NVIDIA GB10").unwrap();
        assert!(rates.contains(&sheet.bf16_tflop_s) && rates.contains(&sheet.memory_gb_s), "{rates:?}");
    }
}
