package rdmanet_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var yardstickRepeats = flag.Int("repeats", 7, "repeats of everything in BenchmarkYardsticks")

// The work of one measurement, the same for all that are compared.
const (
	yardBulkSize  = 64 << 10
	yardBulkCount = 1000
	yardPingSize  = 64
	yardPingCount = 1000
)

// yardPatience is how long a program or a connection may take, set-up
// included, before it counts as hanging: many times what is usual.
const yardPatience = 20 * time.Second

// yardTries is how often a program that hangs or fails is run in one repeat.
const yardTries = 4

// yardBusyPoll outlasts every pause of a round trip, so that BusyPoll never
// sleeps, as ib_send_lat without -e never does.
const yardBusyPoll = time.Second

// A yardMeasure is one way to move the same bytes. It returns MiB/s, or the
// microseconds of half a round trip.
type yardMeasure struct {
	name    string
	measure yardFunc
}

type yardFunc func(tb testing.TB, addr string) (float64, error)

// Those that are compared, by what they are called in the table.
const (
	yardSendBw   = "`ib_send_bw -e`"
	yardSendLatE = "`ib_send_lat -e`"
	yardSendLat  = "`ib_send_lat`"
	yardRBulk    = "rsockets"
	yardRPing    = "rsockets, mean"
	yardTCPBulk  = "TCP"
	yardTCPPing  = "TCP, round trips"
	yardBulk     = "rdmanet"
	yardPing     = "rdmanet, round trips"
	yardPoll     = "rdmanet, BusyPoll"
)

var yardMeasures = []yardMeasure{
	{yardSendBw, perftest("ib_send_bw", 3, "-e", "-s", strconv.Itoa(yardBulkSize), "-n", strconv.Itoa(yardBulkCount))},
	{yardBulk, goBulk("rdmanet")},
	{yardRBulk, rstreamBulk},
	{yardTCPBulk, goBulk("tcp")},
	{yardSendLatE, perftest("ib_send_lat", 4, "-e", "-s", strconv.Itoa(yardPingSize), "-n", strconv.Itoa(yardPingCount))},
	{yardPing, goPing("rdmanet", 0)},
	{yardRPing, rstreamPing},
	{yardTCPPing, goPing("tcp", 0)},
	{yardSendLat, perftest("ib_send_lat", 4, "-s", strconv.Itoa(yardPingSize), "-n", strconv.Itoa(yardPingCount))},
	{yardPoll, goPing("rdmanet", yardBusyPoll)},
}

// A yardRow puts one of ours against one of the others. A goal of zero is none.
type yardRow struct {
	ours, others string
	goal         map[string]float64 // by driver
}

// A yardGroup is the rows of one thing to measure.
type yardGroup struct {
	what    string
	atLeast bool // more is better, else less
	rows    []yardRow
}

func onBoth(goal float64) map[string]float64 { return map[string]float64{"rxe": goal, "siw": goal} }

var yardGroups = []yardGroup{
	{"64 KiB writes, MiB/s", true, []yardRow{
		{yardBulk, yardSendBw, map[string]float64{"rxe": 0.95, "siw": 0.6}},
		{yardBulk, yardRBulk, map[string]float64{"rxe": 1}},
		{yardBulk, yardTCPBulk, map[string]float64{"siw": 1.5}},
	}},
	{"64 B one way, µs", false, []yardRow{
		{yardPing, yardSendLatE, onBoth(1.25)},
		{yardPing, yardRPing, nil},
		{yardPing, yardTCPPing, onBoth(1)},
	}},
	{"64 B one way, BusyPoll, µs", false, []yardRow{
		{yardPoll, yardSendLat, onBoth(1.6)},
		{yardPoll, yardTCPPing, onBoth(0.6)},
	}},
}

// BenchmarkYardsticks puts rdmanet on an RDMA device against what others do on
// it: the verbs alone (perftest), rsockets (rstream), and TCP on the same
// address, every one between two processes. All are measured once in each
// repeat, and the ratios are those of one repeat, so that what else the machine
// does falls on both. The table goes to standard output and, in a guest, to the
// file table.md among the results; vm/bench is the command for it.
func BenchmarkYardsticks(b *testing.B) {
	addr, dev := os.Getenv("RDMANET_VM_ADDR"), os.Getenv("RDMANET_VM_DEVICE")
	if addr == "" {
		b.Skip("RDMANET_VM_ADDR names no RDMA device: vm/bench runs this where there is one")
	}
	for b.Loop() {
		values := make(map[string][]float64) // by name; NaN where it could not be measured
		for repeat := range *yardstickRepeats {
			for i := range yardMeasures {
				m := yardMeasures[(i+repeat)%len(yardMeasures)] // who begins takes turns too
				v, err := m.measure(b, addr)
				if err != nil {
					fmt.Fprintf(os.Stderr, "repeat %d: %s: %v\n", repeat+1, m.name, err)
					v = math.NaN()
				}
				fmt.Fprintf(os.Stderr, "repeat %d of %d: %s: %.1f\n", repeat+1, *yardstickRepeats, m.name, v)
				values[m.name] = append(values[m.name], v)
			}
		}
		table := yardTable(dev, values)
		fmt.Print("\n" + table)
		if dir := os.Getenv("RDMANET_VM_RESULTS"); dir != "" {
			if err := os.WriteFile(filepath.Join(dir, "table.md"), []byte(table), 0o644); err != nil {
				b.Fatal(err)
			}
		}
		for _, m := range yardMeasures {
			if measured := len(present(values[m.name])); 2*measured <= *yardstickRepeats {
				b.Errorf("%s was measured %d times in %d repeats", m.name, measured, *yardstickRepeats)
			}
		}
	}
	b.ReportMetric(0, "ns/op") // not shown: it would be the time of the comparison
}

// yardTable is the comparison in Markdown.
func yardTable(dev string, values map[string][]float64) string {
	driver := strings.TrimRight(dev, "0123456789")
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	var t strings.Builder
	fmt.Fprintf(&t, "%s: medians of %d repeats (quartiles), Linux %s, %s, %d processors\n\n",
		dev, *yardstickRepeats, bytes.TrimSpace(kernel), runtime.Version(), runtime.NumCPU())
	t.WriteString("| " + driver + " | rdmanet | against | it | ratio (quartiles) | to reach |\n|---|---|---|---|---|---|\n")
	for _, g := range yardGroups {
		for i, row := range g.rows {
			what := g.what
			if i > 0 {
				what = ""
			}
			ours, others := values[row.ours], values[row.others]
			var ratios []float64
			for r := range ours {
				ratios = append(ratios, ours[r]/others[r])
			}
			ratios = present(ratios)
			goal := ""
			if want := row.goal[driver]; want != 0 && len(ratios) > 0 {
				word, met := "at most", quantile(ratios, 0.5) <= want
				if g.atLeast {
					word, met = "at least", quantile(ratios, 0.5) >= want
				}
				goal = fmt.Sprintf("%s %g: %s", word, want, map[bool]string{true: "met", false: "**missed**"}[met])
			}
			fmt.Fprintf(&t, "| %s | %s | %s | %s | %s | %s |\n",
				what, summary("%.0f", ours), row.others, summary("%.0f", others), summary("%.2f", ratios), goal)
		}
	}
	for _, m := range yardMeasures {
		if missing := *yardstickRepeats - len(present(values[m.name])); missing > 0 {
			fmt.Fprintf(&t, "\n%s failed in %d of the repeats, which then do not count for it.\n", m.name, missing)
		}
	}
	return t.String()
}

// present leaves out what could not be measured.
func present(sample []float64) []float64 {
	return slices.DeleteFunc(slices.Clone(sample), math.IsNaN)
}

// summary is the median of a sample with its quartiles.
func summary(format string, sample []float64) string {
	sample = present(sample)
	if len(sample) == 0 {
		return "none"
	}
	return fmt.Sprintf(format+" ("+format+", "+format+")",
		quantile(sample, 0.5), quantile(sample, 0.25), quantile(sample, 0.75))
}

// goBulk writes one way on a net.Conn; the clock stops when the far end has
// said that all has come. A tenth of the work goes before.
func goBulk(transport string) yardFunc {
	return goMeasure(BenchService{Transport: transport, Name: "sink", Size: yardBulkSize}, 0,
		func(c net.Conn) (float64, error) {
			buf := make([]byte, yardBulkSize)
			send := func(count int) error {
				if _, err := c.Write(binary.BigEndian.AppendUint64(nil, uint64(count*len(buf)))); err != nil {
					return err
				}
				for range count {
					if _, err := c.Write(buf); err != nil {
						return err
					}
				}
				_, err := io.ReadFull(c, make([]byte, 1))
				return err
			}
			if err := send(yardBulkCount / 10); err != nil {
				return 0, err
			}
			start := time.Now()
			err := send(yardBulkCount)
			return yardBulkSize * yardBulkCount / time.Since(start).Seconds() / (1 << 20), err
		})
}

// goPing makes round trips on a net.Conn and returns half of the median one.
func goPing(transport string, busyPoll time.Duration) yardFunc {
	return goMeasure(BenchService{Transport: transport, Name: "echo", Size: yardPingSize}, busyPoll,
		func(c net.Conn) (float64, error) {
			buf, trips := make([]byte, yardPingSize), make([]float64, yardPingCount)
			for i := range trips {
				start := time.Now()
				if _, err := c.Write(buf); err != nil {
					return 0, err
				}
				if _, err := io.ReadFull(c, buf); err != nil {
					return 0, err
				}
				trips[i] = time.Since(start).Seconds() * 1e6
			}
			return quantile(trips, 0.5) / 2, nil
		})
}

// goMeasure measures on a connection to a fresh process, which serves s.
func goMeasure(s BenchService, busyPoll time.Duration, measure func(net.Conn) (float64, error)) yardFunc {
	return func(tb testing.TB, _ string) (float64, error) {
		defer func(d time.Duration) { *benchBusyPoll = d }(*benchBusyPoll)
		*benchBusyPoll = busyPoll
		scope := &benchScope{TB: tb}
		defer scope.end()
		c := listenBench(scope, startBenchPeer(scope, 2), s).mustDial(scope)
		if err := c.SetDeadline(time.Now().Add(yardPatience)); err != nil {
			return 0, err
		}
		return measure(c)
	}
}

// perftest runs one of those programs; column is where its table has the value.
// The depth of its queues is that of its completion queue too, and what -e
// leaves on that must fit, or it waits for ever.
func perftest(program string, column int, flags ...string) yardFunc {
	flags = append([]string{"-R", "-F"}, flags...) // by rdma_cm; no word on how fast the processor is
	if program == "ib_send_lat" {
		flags = append(flags, "-t", strconv.Itoa(2*yardPingCount), "-r", strconv.Itoa(2*yardPingCount))
	}
	return yardProgram(func(ctx context.Context, addr, port string) (server, client *exec.Cmd) {
		flags := append([]string{"-p", port}, flags...)
		return exec.CommandContext(ctx, program, flags...), exec.CommandContext(ctx, program, append(flags, addr)...)
	}, func(fields []string) (float64, bool) {
		if len(fields) <= column || fields[0] != strconv.Itoa(yardPingSize) && fields[0] != strconv.Itoa(yardBulkSize) {
			return 0, false
		}
		v, err := strconv.ParseFloat(fields[column], 64)
		return v, err == nil
	})
}

// rstreamBulk sends half of the work one way, then half the other.
func rstreamBulk(tb testing.TB, addr string) (float64, error) {
	usec, err := rstream(yardBulkSize, yardBulkCount/2, 1)(tb, addr)
	return yardBulkSize / usec * 1e6 / (1 << 20), err
}

// rstreamPing is a mean: rstream knows no median.
func rstreamPing(tb testing.TB, addr string) (float64, error) {
	return rstream(yardPingSize, 1, yardPingCount)(tb, addr)
}

// rstream returns the microseconds of a transfer over rsockets, with calls that
// block, as those of a net.Conn do.
func rstream(size, count, iterations int) yardFunc {
	flags := []string{"-T", "b", "-S", strconv.Itoa(size), "-C", strconv.Itoa(count), "-I", strconv.Itoa(iterations)}
	return yardProgram(func(ctx context.Context, addr, port string) (server, client *exec.Cmd) {
		flags := append([]string{"-p", port}, flags...)
		return exec.CommandContext(ctx, "rstream", append(flags, "-b", addr)...),
			exec.CommandContext(ctx, "rstream", append(flags, "-s", addr)...)
	}, func(fields []string) (float64, bool) {
		if len(fields) == 0 || fields[0] != "custom" {
			return 0, false
		}
		v, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		return v, err == nil
	})
}

// yardPort is the port that the last program listened on. Each gets one of its
// own, since one that was killed may hold on to it for a while.
var yardPort = 20000

// yardProgram runs a server and a client, and again when they hang or fail, as
// perftest does at times. value finds the figure in a line of the client's.
func yardProgram(
	commands func(ctx context.Context, addr, port string) (server, client *exec.Cmd),
	value func(fields []string) (float64, bool),
) yardFunc {
	once := func(addr string) (float64, error) {
		ctx, cancel := context.WithTimeout(context.Background(), yardPatience)
		defer cancel()
		yardPort++
		port := strconv.Itoa(yardPort)
		server, client := commands(ctx, addr, port)
		if err := server.Start(); err != nil {
			return 0, err
		}
		defer func() {
			// The figure is there, and it may hang at the end: it gets a moment to go.
			defer time.AfterFunc(time.Second, cancel).Stop()
			server.Wait()
		}()
		if err := awaitListener(ctx, port); err != nil {
			return 0, err
		}
		out, err := client.CombinedOutput()
		for line := range strings.Lines(string(out)) {
			if v, ok := value(strings.Fields(line)); ok && v > 0 {
				return v, nil
			}
		}
		return 0, fmt.Errorf("%v printed no figure: %w\n%s", client.Args, errors.Join(err, ctx.Err()), out)
	}
	return func(_ testing.TB, addr string) (v float64, err error) {
		for try := range yardTries {
			if v, err = once(addr); err == nil {
				return v, nil
			}
			fmt.Fprintf(os.Stderr, "try %d of %d: %v\n", try+1, yardTries, err)
		}
		return 0, err
	}
}

// awaitListener waits until somebody listens on port by rdma_cm.
func awaitListener(ctx context.Context, port string) error {
	for {
		ids, err := exec.CommandContext(ctx, "rdma", "resource", "show", "cm_id").Output()
		if err != nil {
			return fmt.Errorf("rdma resource show cm_id: %w", err)
		}
		for line := range strings.Lines(string(ids)) {
			if strings.Contains(line, " state LISTEN ") && strings.Contains(line, ":"+port+" ") {
				return nil
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
}
