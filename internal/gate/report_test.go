package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func printed(steps ...*step) (string, bool) {
	var b strings.Builder
	r := report{steps, 122}
	r.print(&b)
	return b.String(), r.passed()
}

func stepOf(name string, how status, v verdict) *step {
	return &step{name: name, result: result{Status: how, Seconds: 61, verdict: v}}
}

func TestReportPassed(t *testing.T) {
	text, ok := printed(
		stepOf("lint", passed, verdict{}),
		stepOf("unit", passed, verdict{Tests: 100, Again: 1, Flaky: []string{"TestX of rdmanet: too late"}, Skipped: map[string]int{"no tshark": 2}}),
	)
	require.True(t, ok)
	require.Equal(t, `
  step  result  seconds  tests  run again  flaky  skipped
  lint      ok       61      0          0      0        0
  unit      ok       61    100          1      1        2
   all              122                                  

skipped: 2 tests: no tshark
flaky: TestX of rdmanet: too late
2 passed, 0 failed, 0 skipped
`, text)
}

// The first failure comes last, and all that matters is within the last hundred lines.
func TestReportFailed(t *testing.T) {
	var long strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&long, "line %d\n", i)
	}
	text, ok := printed(
		stepOf("lint", passed, verdict{}),
		stepOf("unit", failed, verdict{Failure: "TestX failed each time\n" + long.String()}),
		stepOf("guests", notRun, verdict{}),
	)
	require.False(t, ok)
	lines := strings.Split(text, "\n")
	require.Less(t, len(lines), 100)
	require.Contains(t, text, "FAILED: unit: TestX failed each time\nline 0\n")
	require.Contains(t, text, "line 999\n1 passed, 1 failed, 1 skipped\n")
	require.Contains(t, text, "[941 lines are left out]")
}

// More flaky tests than a busy machine explains are a defect of something.
func TestReportTooManyFlaky(t *testing.T) {
	var v verdict
	for i := range mostFlaky {
		v.Flaky = append(v.Flaky, fmt.Sprintf("Test%d: too late", i))
	}
	_, ok := printed(stepOf("unit", passed, v))
	require.True(t, ok)
	text, ok := printed(stepOf("unit", passed, v), stepOf("guests", passed, verdict{Flaky: []string{"TestX of rdmanet: too late"}}))
	require.False(t, ok)
	require.Contains(t, text, "FAILED: 6 flaky tests, and at most 5 are excused\n")
}
