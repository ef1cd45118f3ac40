package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const sample = `# Page

<!-- chart: One -->
| case | TCP | rdmanet | ratio (quartiles) |
|---|---|---|---|
| writes of 64 B, MB/s | 42 | 25 | 0.59 (0.55, 0.71) |
| round trip, 64 B, µs | 46 | 26 | 0.5 (0.4, 0.8) |

Text.

<!-- chart: One; under load -->
| case | TCP | rdmanet | ratio (quartiles) |
|---|---|---|---|
| writes of 64 B, MB/s | 84 | 26 | 0.28 (0.26, 0.46) |

| case | TCP | rdmanet | ratio (quartiles) |
|---|---|---|---|
| without a mark, MB/s | 1 | 1 | 1 (1, 1) |

<!-- chart: Two -->
| rxe | rdmanet | against | it | ratio (quartiles) | to reach |
|---|---|---|---|---|---|
| a & b, MiB/s | 94 (93, 95) | verbs | 91 (88, 92) | 1.02 (1.02, 1.08) | at least 1: met |
|  | 94 (93, 95) | TCP | 195 (182, 228) | 0.48 (0.41, 0.51) |  |
| datagrams, /s | 67456 | UDP | 53358 | 1.26 (1.13, 1.54) |  |
`

// TestParse checks which rows are drawn, and with what.
func TestParse(t *testing.T) {
	panels, err := parse(sample)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range panels {
		got = append(got, p.title+"/"+p.series)
		for _, r := range p.rows {
			got = append(got, r.name+": "+r.figures())
		}
	}
	want := []string{
		"One/under load", "writes of 64 B: 42, 25; 84, 26 MB/s", "round trip, 64 B: 46, 26 µs",
		"Two/", "a & b: 195, 94 MiB/s", "datagrams: 53358, 67456 /s (UDP)",
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("got\n%s\nwant\n%s", g, w)
	}
	if p := panels[0].rows[0].plain; p.speed != 0.59 || p.low != 0.55 || p.high != 0.71 {
		t.Errorf("a rate: %+v", p)
	}
	if p := panels[0].rows[1].plain; p.speed != 2 || p.low != 1.25 || p.high != 2.5 {
		t.Errorf("a time, of which less is better: %+v", p)
	}
	crlf, err := parse(strings.ReplaceAll(sample, "\n", "\r\n"))
	if err != nil || !bytes.Equal(draw(crlf), draw(panels)) {
		t.Errorf("lines that end with CR LF make another chart, or %v", err)
	}
}

// TestParseRefuses checks that a table that cannot be drawn is an error, and not left out.
func TestParseRefuses(t *testing.T) {
	const head = "<!-- chart: One -->\n| case | TCP | rdmanet | ratio (quartiles) |\n|---|---|---|---|\n"
	for name, doc := range map[string]string{
		"no table at all":     "# Page\n",
		"no table behind":     "<!-- chart: One -->\n\n| case |\n",
		"not a mark":          "<!-- chart One -->\n",
		"no rows":             head,
		"no unit":             head + "| writes | 1 | 1 | 1 (1, 1) |\n",
		"an unknown unit":     head + "| writes, kg | 1 | 1 | 1 (1, 1) |\n",
		"a column is missing": strings.Replace(head, "rdmanet", "other", 1) + "| writes, /s | 1 | 1 | 1 (1, 1) |\n",
		"a cell is missing":   head + "| writes, /s | 1 | 1 (1, 1) |\n",
		"no figure":           head + "| writes, /s | none | 1 | 1 (1, 1) |\n",
		"no quartiles":        head + "| writes, /s | 1 | 1 | 1 |\n",
		"quartiles apart":     head + "| writes, /s | 1 | 1 | 1 (2, 3) |\n",
		"a ratio of zero":     head + "| writes, /s | 1 | 1 | 0 (0, 0) |\n",
		"a row twice":         head + "| writes, /s | 1 | 1 | 1 (1, 1) |\n| writes, /s | 1 | 1 | 1 (1, 1) |\n",
		"two series": strings.Replace(head, "One", "One; a", 1) + "| writes, /s | 1 | 1 | 1 (1, 1) |\n" +
			"\n" + strings.Replace(head, "One", "One; b", 1) + "| writes, /s | 1 | 1 | 1 (1, 1) |\n",
	} {
		if panels, err := parse(doc); err == nil {
			t.Errorf("%s: %d panels and no error", name, len(panels))
		}
	}
}

// TestAxis checks that the axis begins and ends with the nearest ticks, and has 1.
func TestAxis(t *testing.T) {
	for _, tt := range []struct {
		low, high float64
		want      []float64
	}{
		{1, 1, []float64{1, 2}},
		{0.12, 3.9, []float64{0.1, 0.2, 0.5, 1, 2, 5}},
		{0.5, 2, []float64{0.5, 1, 2}},
		{3, 11, []float64{1, 2, 5, 10, 20}},
		{0.04, 0.3, []float64{0.02, 0.05, 0.1, 0.2, 0.5, 1, 2}},
	} {
		a := newAxis([]*panel{{rows: []*row{{plain: &point{low: tt.low, speed: tt.low, high: tt.high}}}}})
		if len(a.ticks) != len(tt.want) {
			t.Errorf("%g to %g: %v, want %v", tt.low, tt.high, a.ticks, tt.want)
			continue
		}
		for i, v := range a.ticks {
			if d := v/tt.want[i] - 1; d < -1e-9 || d > 1e-9 {
				t.Errorf("%g to %g: %v, want %v", tt.low, tt.high, a.ticks, tt.want)
			}
		}
		for _, v := range []float64{tt.low, tt.high} {
			if x := a.x(v); x < plotLeft || x > plotRight {
				t.Errorf("%g lies at %g", v, x)
			}
		}
	}
}

// TestDraw checks that the chart is XML, and that a reader finds each case in it.
func TestDraw(t *testing.T) {
	panels, err := parse(sample)
	if err != nil {
		t.Fatal(err)
	}
	var texts strings.Builder
	circles := 0
	d := xml.NewDecoder(bytes.NewReader(draw(panels)))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch v := token.(type) {
		case xml.StartElement:
			if v.Name.Local == "circle" {
				circles++
			}
		case xml.CharData:
			texts.Write(v)
		}
	}
	for _, want := range []string{"One", "Two", "hollow dots: under load", "a & b", "195, 94 MiB/s"} {
		if !strings.Contains(texts.String(), want) {
			t.Errorf("no %q in the chart", want)
		}
	}
	if circles != 5 {
		t.Errorf("%d dots, want 5", circles)
	}
}

// TestCheck checks that -check finds a chart that is not that of the tables.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "page.md"), filepath.Join(dir, "chart.svg")
	write := func(doc string) {
		t.Helper()
		if err := os.WriteFile(in, []byte(doc), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(sample)
	if err := run(in, out, true); err == nil {
		t.Error("a chart that does not exist is current")
	}
	if err := run(in, out, false); err != nil {
		t.Fatal(err)
	}
	if err := run(in, out, true); err != nil {
		t.Error(err)
	}
	write(strings.Replace(sample, "| 42 | 25 |", "| 42 | 26 |", 1))
	if err := run(in, out, true); err == nil {
		t.Error("a chart of other figures is current")
	}
}
