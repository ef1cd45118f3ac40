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

	"github.com/rdmanet/rdmanet"
)

var yardstickRepeats = flag.Int("repeats", 7, "repeats of everything in BenchmarkYardsticks")

// The work of one measurement, the same for all that are compared.
const (
	yardBulkSize  = 64 << 10
	yardBulkCount = 1000
	yardPingSize  = 64
	yardPingCount = 1000
)

// How long a program, and a connection of ours, may take before it counts as
// hanging: many times what is usual. A program is run again then.
const (
	yardPatience     = 20 * time.Second
	yardConnPatience = time.Minute
)

// yardTries is how often a program that hangs or fails is run in one repeat.
const yardTries = 4

// yardBusyPoll outlasts every pause of a round trip, so that BusyPoll never
// sleeps, as ib_send_lat without -e never does.
const yardBusyPoll = time.Second

// A yardstick is one way to move the same bytes.
type yardstick struct {
	name, unit string
	measure    yardFunc
}

// A yardFunc returns MiB/s, the microseconds of half a round trip, or those of
// processor time a MiB.
type yardFunc func(tb testing.TB, addr string) (float64, error)

var (
	yardBulk   = &yardstick{"rdmanet", "MiB/s", goBulk("rdmanet", yardBulkSize, yardBulkCount, rate)}
	yardSendBw = &yardstick{"`ib_send_bw -e`", "MiB/s", perftest("ib_send_bw", 3, yardBulkSize, yardBulkCount, "-e")}
	yardRBulk  = &yardstick{"rsockets", "MiB/s", rstreamBulk}
	yardTCP    = &yardstick{"TCP", "MiB/s", goBulk("tcp", yardBulkSize, yardBulkCount, rate)}

	yardPing     = &yardstick{"rdmanet", "µs", goPing("rdmanet", 0)}
	yardSendLatE = &yardstick{"`ib_send_lat -e`", "µs", perftest("ib_send_lat", 4, yardPingSize, yardPingCount, "-e", "-t", "2000", "-r", "2000")}
	yardRPing    = &yardstick{"rsockets (mean)", "µs", rstreamPing}
	yardTCPPing  = &yardstick{"TCP", "µs", goPing("tcp", 0)}

	yardSleep = &yardstick{"rdmanet that never polls", "µs", goPing("rdmanet", -1)}

	yardPoll    = &yardstick{"rdmanet with BusyPoll", "µs", goPing("rdmanet", yardBusyPoll)}
	yardSendLat = &yardstick{"`ib_send_lat`", "µs", perftest("ib_send_lat", 4, yardPingSize, yardPingCount)}

	yardsticks = []*yardstick{
		yardBulk, yardSendBw, yardRBulk, yardTCP,
		yardPing, yardSendLatE, yardRPing, yardTCPPing,
		yardSleep, yardPoll, yardSendLat,
	}
)

// Large writes, which go by RDMA: from and to memory of rdmanet.Alloc's.
const (
	yardLargeBytes = 64 << 20 // in one measurement
	yardMiB        = 1 << 20
	yard16MiB      = 16 << 20
)

// largeSticks are rdmanet, by Write and by QueueMsg, and the others with writes of one
// size.
func largeSticks(size int) (ours, queued, read, write, rsockets, tcp *yardstick) {
	count := yardLargeBytes / size
	name := func(s string) string { return fmt.Sprintf("%s, %d MiB", s, size>>20) }
	return &yardstick{name("rdmanet"), "MiB/s", goBulk("rdmanet", size, count, rate)},
		&yardstick{name("rdmanet, queued"), "MiB/s", goQueued(size, count, rate)},
		&yardstick{name("`ib_read_bw -e`"), "MiB/s", perftest("ib_read_bw", 3, size, max(count, 5), "-e")},
		&yardstick{name("`ib_write_bw`"), "MiB/s", perftest("ib_write_bw", 3, size, max(count, 5))},
		&yardstick{name("rsockets"), "MiB/s", func(tb testing.TB, addr string) (float64, error) {
			usec, err := rstream(size, max(count/2, 1), 1)(tb, addr)
			return float64(size) / usec * 1e6 / (1 << 20), err
		}},
		&yardstick{name("TCP"), "MiB/s", goBulk("tcp", size, count, rate)}
}

// largeGroups is the rows for one size.
func largeGroups(size int) ([]*yardstick, []yardGroup) {
	ours, queued, read, write, rsockets, tcp := largeSticks(size)
	rows := func(ours *yardstick) []yardRow {
		return []yardRow{
			{ours, read},
			{ours, write},
			{ours, rsockets},
			{ours, tcp},
		}
	}
	return []*yardstick{ours, queued, read, write, rsockets, tcp}, []yardGroup{
		{fmt.Sprintf("%d MiB writes, MiB/s", size>>20), rows(ours)},
		{fmt.Sprintf("%d MiB messages, queued, MiB/s", size>>20), rows(queued)},
	}
}

// costSticks are those of largeSticks again whose processor time is compared, the
// kernel's included: of both ends, as these share the machine.
func costSticks(size int) (ours, queued, rsockets, tcp *yardstick) {
	count := yardLargeBytes / size
	name := func(s string) string { return fmt.Sprintf("%s, %d MiB", s, size>>20) }
	const unit = "µs/MiB"
	return &yardstick{name("rdmanet"), unit, goBulk("rdmanet", size, count, cost)},
		&yardstick{name("rdmanet, queued"), unit, goQueued(size, count, cost)},
		&yardstick{name("rsockets"), unit, rstreamCost(size, count)},
		&yardstick{name("TCP"), unit, goBulk("tcp", size, count, cost)}
}

// costGroups is the rows for one size.
func costGroups(size int) ([]*yardstick, []yardGroup) {
	ours, queued, rsockets, tcp := costSticks(size)
	return []*yardstick{ours, queued, rsockets, tcp}, []yardGroup{
		{fmt.Sprintf("%d MiB writes, processor time, µs/MiB", size>>20), []yardRow{{ours, rsockets}, {ours, tcp}}},
		{fmt.Sprintf("%d MiB messages, queued, processor time, µs/MiB", size>>20), []yardRow{{queued, rsockets}, {queued, tcp}}},
	}
}

// A usage is what moving bytes took.
type usage struct {
	elapsed, busy time.Duration // busy is the sum over all processors
}

func rate(bytes int, u usage) float64 { return float64(bytes) / u.elapsed.Seconds() / yardMiB }

func cost(bytes int, u usage) float64 { return u.busy.Seconds() * 1e6 / (float64(bytes) / yardMiB) }

// measureUsage measures what do takes of the whole machine.
func measureUsage(do func() error) (u usage, err error) {
	idle, err := idleTime()
	if err != nil {
		return u, err
	}
	start := time.Now()
	if err := do(); err != nil {
		return u, err
	}
	u.elapsed = time.Since(start)
	now, err := idleTime()
	u.busy = time.Duration(runtime.NumCPU())*u.elapsed - (now - idle)
	return u, err
}

// idleTime is how long the processors have had nothing to do, see proc_stat(5).
func idleTime() (time.Duration, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(stat[:bytes.IndexByte(stat, '\n')]))
	var ticks int
	for _, f := range fields[4:6] { // idle and iowait
		n, err := strconv.Atoi(f)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		ticks += n
	}
	const tick = time.Second / 100
	return time.Duration(ticks) * tick, nil
}

// A yardRow puts one of ours against one of the others.
type yardRow struct{ ours, others *yardstick }

// A yardGroup is the rows of one thing to measure.
type yardGroup struct {
	what string
	rows []yardRow
}

var yardGroups = []yardGroup{
	{"64 KiB writes, MiB/s", []yardRow{
		{yardBulk, yardSendBw},
		{yardBulk, yardRBulk},
		{yardBulk, yardTCP},
	}},
	{"64 B one way, µs", []yardRow{
		{yardPing, yardSendLatE},
		{yardPing, yardRPing},
		{yardPing, yardTCPPing},
	}},
	{"64 B one way, without polling, µs", []yardRow{
		{yardSleep, yardSendLatE},
		{yardSleep, yardTCPPing},
	}},
	{"64 B one way, BusyPoll, µs", []yardRow{
		{yardPoll, yardSendLat},
		{yardPoll, yardTCPPing},
	}},
}

// BenchmarkYardsticks puts rdmanet on an RDMA device against what others do on
// it: the verbs alone (perftest), rsockets (rstream), and TCP on the same
// address, every one between two processes. All are measured once in each
// repeat, and the ratios are those of one repeat, so that what else the machine
// does falls on both. The table goes to the file table.md among the results of
// the guest; vm/bench is the command for it.
func BenchmarkYardsticks(b *testing.B) { runYardsticks(b, yardsticks, yardGroups, "table.md") }

// BenchmarkLarge is BenchmarkYardsticks for large writes; the table is large.md.
func BenchmarkLarge(b *testing.B) {
	small, ofSmall := largeGroups(yardMiB)
	large, ofLarge := largeGroups(yard16MiB)
	costSmall, ofCostSmall := costGroups(yardMiB)
	costLarge, ofCostLarge := costGroups(yard16MiB)
	runYardsticks(b, slices.Concat(small, large, costSmall, costLarge),
		slices.Concat(ofSmall, ofLarge, ofCostSmall, ofCostLarge), "large.md")
}

// runYardsticks makes one table, a file among the results of the guest.
func runYardsticks(b *testing.B, sticks []*yardstick, groups []yardGroup, file string) {
	addr, dev := os.Getenv("RDMANET_VM_ADDR"), os.Getenv("RDMANET_VM_DEVICE")
	if addr == "" {
		b.Skip("RDMANET_VM_ADDR names no RDMA device: vm/bench runs this where there is one")
	}
	for b.Loop() {
		values := make(map[*yardstick][]float64) // NaN where it could not be measured
		for repeat := range *yardstickRepeats {
			for i := range sticks {
				y := sticks[(i+repeat)%len(sticks)] // who begins takes turns too
				v, err := y.measure(b, addr)
				if err != nil {
					v = math.NaN()
					fmt.Fprintf(os.Stderr, "%s: %v\n", y.name, err)
				}
				fmt.Fprintf(os.Stderr, "repeat %d of %d: %s: %.0f %s\n", repeat+1, *yardstickRepeats, y.name, v, y.unit)
				values[y] = append(values[y], v)
			}
		}
		table := yardTable(dev, sticks, groups, values)
		if dir := os.Getenv("RDMANET_VM_RESULTS"); dir == "" {
			fmt.Print("\n" + table)
		} else if err := os.WriteFile(filepath.Join(dir, file), []byte(table), 0o644); err != nil {
			b.Fatal(err)
		}
		for _, y := range sticks {
			if measured := len(present(values[y])); 2*measured <= *yardstickRepeats {
				b.Errorf("%s was measured %d times in %d repeats", y.name, measured, *yardstickRepeats)
			}
		}
	}
	b.ReportMetric(0, "ns/op") // not shown: it would be the time of the comparison
}

// yardTable is the comparison in Markdown.
func yardTable(dev string, sticks []*yardstick, groups []yardGroup, values map[*yardstick][]float64) string {
	driver := strings.TrimRight(dev, "0123456789")
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	var t strings.Builder
	fmt.Fprintf(&t, "%s: medians of %d repeats (quartiles), Linux %s, %s, %d processors\n\n",
		dev, len(values[sticks[0]]), bytes.TrimSpace(kernel), runtime.Version(), runtime.NumCPU())
	t.WriteString("| " + driver + " | rdmanet | against | it | ratio (quartiles) |\n|---|---|---|---|---|\n")
	for _, g := range groups {
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
			fmt.Fprintf(&t, "| %s | %s | %s | %s | %s |\n",
				what, summary("%.0f", ours), row.others.name, summary("%.0f", others), summary("%.2f", ratios))
		}
	}
	for _, y := range sticks {
		if missing := len(values[y]) - len(present(values[y])); missing > 0 {
			fmt.Fprintf(&t, "\n%s (%s) could not be measured in %d of the repeats, which then do not count for it.\n",
				y.name, y.unit, missing)
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

// goBulk writes one way on a net.Conn, count times size bytes; the clock stops
// when the far end has said that all has come. A tenth of the work goes before. value
// makes the figure of it.
func goBulk(transport string, size, count int, value func(int, usage) float64) yardFunc {
	registered := size >= yardMiB
	return goMeasure(BenchService{Transport: transport, Name: "sink", Size: size, Registered: registered}, 0,
		func(c net.Conn) (float64, error) {
			buf, free := benchMemory(size, registered)
			defer free()
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
			if err := send(max(1, count/10)); err != nil {
				return 0, err
			}
			u, err := measureUsage(func() error { return send(count) })
			return value(size*count, u), err
		})
}

// goQueued is goBulk of rdmanet with messages that are queued, some ahead of the one
// that is being fetched, each from memory of its own. The far end has room for some
// of them too.
func goQueued(size, count int, value func(int, usage) float64) yardFunc {
	const ahead = 8
	s := BenchService{Transport: "rdmanet", Name: "sink", Size: max(size, 4*yardMiB), Registered: true}
	return goMeasure(s, 0, func(nc net.Conn) (float64, error) {
		c := nc.(*rdmanet.Conn)
		var bufs [ahead][]byte
		for i := range bufs {
			buf, free := benchMemory(size, true)
			defer free()
			bufs[i] = buf
		}
		send := func(count int) error {
			if _, err := c.Write(binary.BigEndian.AppendUint64(nil, uint64(count*size))); err != nil {
				return err
			}
			var sends [ahead]*rdmanet.PendingMessage
			for i := range count + ahead {
				if s := sends[i%ahead]; s != nil {
					if _, err := s.Result(); err != nil {
						return err
					}
				}
				sends[i%ahead] = nil
				if i < count {
					sends[i%ahead] = c.QueueMsg(bufs[i%ahead])
				}
			}
			_, err := io.ReadFull(c, make([]byte, 1))
			return err
		}
		if err := send(max(ahead, count/10)); err != nil {
			return 0, err
		}
		u, err := measureUsage(func() error { return send(count) })
		return value(size*count, u), err
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
		if err := c.SetDeadline(time.Now().Add(yardConnPatience)); err != nil {
			return 0, err
		}
		return measure(c)
	}
}

// perftest runs one of those programs; column is where its table has the value.
// With -e ib_send_lat leaves completions of its sends on the completion queue,
// which must hold all of them, or it waits for ever: hence -t and -r.
func perftest(program string, column, size, count int, flags ...string) yardFunc {
	flags = append([]string{
		"-R", // connect by rdma_cm: iWARP knows no other way
		"-F", // no word on how fast the processor is
		"-s", strconv.Itoa(size), "-n", strconv.Itoa(count),
	}, flags...)
	return yardProgram(func(ctx context.Context, addr, port string) (server, client *exec.Cmd) {
		flags := append([]string{"-p", port}, flags...)
		return exec.CommandContext(ctx, program, flags...), exec.CommandContext(ctx, program, append(flags, addr)...)
	}, func(fields []string) (float64, bool) {
		if len(fields) <= column || fields[0] != strconv.Itoa(size) || fields[1] != strconv.Itoa(count) {
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

// rstreamCost is the processor time of what a long transfer has more than a short
// one: the beginning and the end of the programs are the same in both.
func rstreamCost(size, count int) yardFunc {
	busy := func(tb testing.TB, addr string, count int) (time.Duration, error) {
		u, err := measureUsage(func() error {
			_, err := rstream(size, count, 1)(tb, addr)
			return err
		})
		return u.busy, err
	}
	return func(tb testing.TB, addr string) (float64, error) {
		short, err := busy(tb, addr, 1)
		if err != nil {
			return 0, err
		}
		long, err := busy(tb, addr, 1+count)
		return cost(2*size*count, usage{busy: long - short}), err // both ways
	}
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

func TestYardTable(t *testing.T) {
	nan := math.NaN()
	same := []float64{10, 20, 30}
	values := map[*yardstick][]float64{
		yardBulk: {50, 60, 70}, yardSendBw: {100, 60, 70}, yardRBulk: {100, 100, 100}, yardTCP: {nan, nan, nan},
		yardPing: same, yardSendLatE: {10, nan, 10}, yardRPing: same, yardTCPPing: same,
		yardPoll: same, yardSendLat: same,
	}
	got := yardTable("rxe0", yardsticks, yardGroups, values)
	for _, want := range []string{
		"rxe0: medians of 3 repeats (quartiles), ",
		"| 64 KiB writes, MiB/s | 60 (60, 70) | `ib_send_bw -e` | 70 (70, 100) | 1.00 (1.00, 1.00) |\n",
		"|  | 60 (60, 70) | rsockets | 100 (100, 100) | 0.60 (0.60, 0.70) |\n",
		"|  | 60 (60, 70) | TCP | none | none |\n",
		"| 64 B one way, µs | 20 (20, 30) | `ib_send_lat -e` | 10 (10, 10) | 3.00 (1.00, 3.00) |\n",
		"|  | 20 (20, 30) | TCP | 20 (20, 30) | 1.00 (1.00, 1.00) |\n",
		"\nTCP (MiB/s) could not be measured in 3 of the repeats",
		"\n`ib_send_lat -e` (µs) could not be measured in 1 of the repeats",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}
