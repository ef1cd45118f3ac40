package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// judged returns the verdict on files of testdata, which gotestsum has written.
func judged(t *testing.T, names ...string) verdict {
	t.Helper()
	j := newJudge()
	for _, name := range names {
		f, err := os.Open(filepath.Join("testdata", name+".json"))
		require.NoError(t, err)
		require.NoError(t, j.read(f))
		require.NoError(t, f.Close())
	}
	return j.verdict()
}

func TestVerdict(t *testing.T) {
	for _, tt := range []struct {
		name    string
		tests   int
		again   int
		flaky   []string
		failure []string // texts that must be in it, in this order
	}{
		{name: "good", tests: 3},
		{name: "flaky", tests: 2, again: 1, flaky: []string{"TestFlaky of example.org/gm/flaky: a_test.go:4: took 3 s and not 2 s"}},
		{name: "always", tests: 1, again: 2, failure: []string{"TestAlways of example.org/gm/always failed in 3 of its 3 runs", "it is wrong"}},
		{name: "race", tests: 1, failure: []string{"TestRace", "a data race, which no repetition excuses", "WARNING: DATA RACE"}},
		{name: "panicky", tests: 1, failure: []string{"TestPanics", "a panic", "nil pointer dereference"}},
		{name: "fatal", tests: 1, again: 2, failure: []string{"TestFatal", "a fatal error", "concurrent map writes"}},
		{name: "leak", tests: 1, again: 1, failure: []string{"TestLeaks", "a defect", "1 goroutine left"}},
		{name: "exit", tests: 1, again: 1, failure: []string{"TestExits", "the end of the process in the middle of a test", "the device has gone"}},
		{name: "main", tests: 1, failure: []string{"package example.org/gm/main failed", "the device is not there"}},
		{name: "build", failure: []string{"package example.org/gm/build failed", "undefined: testing"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := judged(t, tt.name)
			require.Equal(t, tt.tests, v.Tests)
			require.Equal(t, tt.again, v.Again)
			require.Equal(t, tt.flaky, v.Flaky)
			require.Equal(t, len(tt.failure) > 0, v.Failure != "", v.Failure)
			rest := v.Failure
			for _, text := range tt.failure {
				_, after, found := strings.Cut(rest, text)
				require.True(t, found, "%q is not in %q", text, rest)
				rest = after
			}
		})
	}
}

// What nothing excuses is told before what has merely failed, as it may be the reason.
func TestVerdictOrder(t *testing.T) {
	v := judged(t, "always", "flaky", "good", "leak")
	require.Contains(t, v.Failure, "TestLeaks")
	require.Equal(t, 7, v.Tests)
	require.Len(t, v.Flaky, 1)
	require.Equal(t, map[string]int{"no such device here": 1}, v.Skipped)
}

// A test that has begun and not ended counts as failed, unless it ends when it is run again.
func TestVerdictUnended(t *testing.T) {
	begun := `{"Action":"run","Package":"p","Test":"TestX"}
{"Action":"output","Package":"p","Test":"TestX","Output":"half a line"}
`
	j := newJudge()
	require.NoError(t, j.read(strings.NewReader(begun)))
	require.Contains(t, j.verdict().Failure, "TestX of p has begun and not ended\nhalf a line")
	require.NoError(t, j.read(strings.NewReader(begun+`{"Action":"pass","Package":"p","Test":"TestX"}`)))
	require.Empty(t, j.verdict().Failure)
	require.Equal(t, []string{"TestX of p: half a line"}, j.verdict().Flaky)
	require.Error(t, j.read(strings.NewReader("vm: no event\n")))
}

// A test that was skipped when it was run again has not passed.
func TestVerdictSkippedAgain(t *testing.T) {
	j := newJudge()
	require.NoError(t, j.read(strings.NewReader(`{"Action":"run","Package":"p","Test":"TestX"}
{"Action":"fail","Package":"p","Test":"TestX"}
{"Action":"run","Package":"p","Test":"TestX"}
{"Action":"skip","Package":"p","Test":"TestX"}
`)))
	require.Contains(t, j.verdict().Failure, "TestX of p failed in 1 of its 2 runs")
}

// What a test prints in a run that passes is nothing that it was run again for.
func TestVerdictPassedWithDefect(t *testing.T) {
	j := newJudge()
	require.NoError(t, j.read(strings.NewReader(`{"Action":"run","Package":"p","Test":"TestX"}
{"Action":"fail","Package":"p","Test":"TestX"}
{"Action":"run","Package":"p","Test":"TestX"}
{"Action":"output","Package":"p","Test":"TestX","Output":"an example: DEFECT: bytes lost\n"}
{"Action":"pass","Package":"p","Test":"TestX"}
`)))
	require.Empty(t, j.verdict().Failure)
	require.Equal(t, []string{"TestX of p: it printed nothing"}, j.verdict().Flaky)
}

// gotestsum runs nothing again where it sees what looks like a panic, so that a test that
// prints one and passes takes its second run from every other.
func TestVerdictAlarm(t *testing.T) {
	for _, tt := range []struct{ name, output, failure string }{
		{"a panic", "panic: of a child\n", "panic: of a child"},
		{"a data race", "WARNING: DATA RACE\n", "WARNING: DATA RACE"},
		{"behind other text", "child: panic: of a child\n", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j := newJudge()
			for _, e := range []event{
				{Action: "run", Package: "p", Test: "TestX"},
				{Action: "output", Package: "p", Test: "TestX", Output: "DEFECT: an example\n"},
				{Action: "output", Package: "p", Test: "TestX", Output: tt.output},
				{Action: "pass", Package: "p", Test: "TestX"},
			} {
				j.take(&e)
			}
			require.Equal(t, tt.failure != "", j.verdict().Failure != "")
			require.Contains(t, j.verdict().Failure, tt.failure)
			for _, e := range []event{
				{Action: "run", Package: "p", Test: "TestY"},
				{Action: "fail", Package: "p", Test: "TestY"},
			} {
				j.take(&e)
			}
			require.Contains(t, j.verdict().Failure, "TestY of p failed in its only run; it was not run again")
		})
	}
}
