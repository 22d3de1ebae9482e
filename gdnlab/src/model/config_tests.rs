use super::*;

fn presets() -> impl Iterator<Item = (Mixer, Size, ModelConfig)> {
    Mixer::ALL.into_iter().flat_map(|mixer| Size::ALL.map(|size| (mixer, size, ModelConfig::preset(mixer, size))))
}

#[test]
fn every_preset_is_valid_and_follows_the_rules_of_the_ladder() {
    for (mixer, size, config) in presets() {
        config.validate().unwrap();
        assert_eq!(config.mixer, mixer);
        if size == Size::Tiny {
            continue;
        }
        assert_eq!(config.vocabulary, 32_000);
        match mixer {
            Mixer::Attention => assert_eq!((config.key_dim, config.key_width()), (64, config.d_model)),
            Mixer::Gdn => {
                assert_eq!((config.key_dim, config.value_dim), (64, 128));
                assert_eq!(4 * config.key_width(), 3 * config.d_model);
            }
        }
    }
    assert_eq!(Size::LADDER.map(|size| ModelConfig::preset(Mixer::Gdn, size).heads), [6, 9, 9, 12]);
    assert_eq!([512, 768, 1024].map(swiglu_hidden), [1536, 2048, 2816]);
}

/// Written out, not by the code's own sums.
#[test]
fn the_parameters_of_a_small_gdn_are_counted_by_hand() {
    let (d, vocabulary, hidden, heads, k, v) = (64u64, 256, 256, 2, 32, 64);
    let mixer = 2 * d * heads * k + 3 * d * heads * v + 2 * d * heads + 4 * heads * (2 * k + v) + 2 * heads + v;
    let expected = ParameterCount {
        embedding: vocabulary * d,
        norms: 5 * d,
        mixer: 2 * mixer,
        mlp: 2 * 3 * d * hidden,
        head: vocabulary * d,
        vectors: 5 * d + 2 * (2 * heads + v),
    };
    let config = ModelConfig::preset(Mixer::Gdn, Size::Tiny);
    assert_eq!(config.parameters(), expected);
    assert_eq!(config.parameters().total(), 199_624);
}

#[test]
fn the_parameters_of_attention_are_those_of_its_four_projections() {
    let count = ModelConfig::preset(Mixer::Attention, Size::M125).parameters();
    assert_eq!(count.mixer, 18 * 4 * 768 * 768);
    assert_eq!(count.mlp, 18 * 3 * 768 * 2048);
    assert_eq!((count.norms, count.vectors), (37 * 768, 37 * 768));
    assert_eq!((count.embedding, count.head), (32_000 * 768, 32_000 * 768));
}

#[test]
fn the_tensors_have_distinct_names_and_add_up_to_the_counts() {
    for (mixer, size, config) in presets() {
        let (tensors, count) = (config.parameter_tensors(), config.parameters());
        let sum = |keep: &dyn Fn(&ParameterTensor) -> bool| -> u64 {
            tensors.iter().filter(|tensor| keep(tensor)).map(ParameterTensor::elements).sum()
        };
        let of = |group| sum(&|tensor: &ParameterTensor| tensor.group == group);
        let groups = [
            (ParameterGroup::Embedding, count.embedding),
            (ParameterGroup::Norm, count.norms),
            (ParameterGroup::Mixer, count.mixer),
            (ParameterGroup::Mlp, count.mlp),
            (ParameterGroup::Head, count.head),
        ];
        for (group, expected) in groups {
            assert_eq!(of(group), expected, "{mixer} {size} {group:?}");
        }
        assert_eq!(sum(&|_| true), count.total());
        assert_eq!(sum(&ParameterTensor::is_vector), count.vectors);
        let names: std::collections::BTreeSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names.len(), tensors.len());
    }
}

#[test]
fn sizes_that_no_model_can_have_are_refused_with_a_remedy() {
    let attention = ModelConfig::preset(Mixer::Attention, Size::M30);
    let gdn = ModelConfig::preset(Mixer::Gdn, Size::M30);
    for (config, expected) in [
        (ModelConfig { layers: 0, ..gdn }, "layers = 0: expected 1 to"),
        (ModelConfig { heads: usize::MAX, ..gdn }, "heads = 18446744073709551615: expected 1 to"),
        (ModelConfig { vocabulary: 50_257, ..gdn }, "vocabulary = 50257: expected a multiple of 8, such as 50264"),
        (ModelConfig { d_model: 500, ..gdn }, "d_model = 500: expected a multiple of 8, such as 504"),
        (ModelConfig { hidden: 1365, ..gdn }, "hidden = 1365: expected a multiple of 8, such as 1368"),
        (ModelConfig { key_dim: 48, ..gdn }, "key_dim = 48: expected a multiple of 32, such as 64"),
        (ModelConfig { value_dim: 288, ..gdn }, "value_dim = 288: expected 32 to 256"),
        (ModelConfig { key_dim: 0, ..gdn }, "key_dim = 0: expected 32 to 256"),
        (ModelConfig { value_dim: 128, ..attention }, "key_dim = 64 and value_dim = 128: expected the same"),
        (ModelConfig { heads: 6, ..attention }, "6 attention heads of 64 make 384, and d_model is 512"),
    ] {
        let message = config.validate().unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    // GDN's heads need not share the width of the model.
    ModelConfig { heads: 5, ..gdn }.validate().unwrap();
}

#[test]
fn names_are_read_back_and_others_refused() {
    for mixer in Mixer::ALL {
        assert_eq!(mixer.to_string().parse::<Mixer>().unwrap(), mixer);
        assert_eq!(serde_json::to_value(mixer).unwrap(), mixer.name());
    }
    for size in Size::ALL {
        assert_eq!(size.to_string().parse::<Size>().unwrap(), size);
        assert_eq!(serde_json::to_value(size).unwrap(), size.name());
    }
    assert!("mamba".parse::<Mixer>().unwrap_err().to_string().contains("expected attn or gdn"));
    assert!("1B".parse::<Size>().unwrap_err().to_string().contains("expected tiny, 30M"));
    let config = ModelConfig::preset(Mixer::Gdn, Size::M250);
    assert_eq!(config.to_string(), "gdn, 20 blocks of width 1024, 12 heads 64/128");
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<ModelConfig>(&json).unwrap(), config);
}
