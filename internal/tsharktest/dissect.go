// Package tsharktest captures what a test sends over the network, and lets Wireshark's
// dissectors of iWARP and SMB Direct check it. They were written independently of rdmanet.
package tsharktest

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// Tally has the counts of what tshark found in a capture.
type Tally struct {
	Requests map[int]int // Requests counts MPA Requests by revision.
	Replies  map[int]int // Replies counts MPA Replies by revision.
	FPDUs    map[iwarpwire.Opcode]int

	GoodCRC, BadCRC, NoCRC int // These count FPDUs by their checksum.

	// These count SMB Direct messages. tshark recognises them by their content, whatever
	// the connection.
	Negotiations, Messages int

	Faults []string // Faults has the frames that tshark calls malformed or wrong, with the reason.
}

// tshark gets these settings. It looks for iWARP on every port before it uses the port
// number. It sorts segments that have overtaken each other. It handles every Send by
// itself, because it puts together only one of several Sends in a TCP segment. It does not
// look for other protocols in the payload, where it could find them only by chance.
var options = []string{
	"-n",
	"-o", "tcp.try_heuristic_first:TRUE",
	"-o", "tcp.reassemble_out_of_order:TRUE",
	"-o", "iwarp_ddp_rdmap.reassemble_iwarp_rdma_send:FALSE",
	"--disable-protocol", "rpcordma",
	"--disable-protocol", "smb",
	"--disable-protocol", "smb2",
}

// Need skips the test if there is no tshark.
func Need(tb testing.TB) {
	tb.Helper()
	if _, err := exec.LookPath("tshark"); err != nil {
		tb.Skipf("%v: vm/install installs it", err)
	}
}

// Dissect returns what tshark finds in the capture at path, or ends the test.
func Dissect(tb testing.TB, path string) *Tally {
	tb.Helper()
	t := &Tally{Requests: map[int]int{}, Replies: map[int]int{}, FPDUs: map[iwarpwire.Opcode]int{}}
	t.count(tb, path)
	t.checksums(tb, path)
	const bad = `tcp && (_ws.malformed || _ws.expert.severity == "Error" || iwarp_mpa.bad_length)`
	for line := range strings.Lines(tshark(tb, path, "-Y", bad, "-T", "fields", "-e", "frame.number", "-e", "frame.protocols", "-e", "_ws.expert.message")) {
		t.Faults = append(t.Faults, "frame "+strings.TrimSpace(line))
	}
	return t
}

// count reads the fields of the messages. There is a line for each frame, and commas
// separate the values of one field.
func (t *Tally) count(tb testing.TB, path string) {
	tb.Helper()
	number := func(s string) int {
		n, err := strconv.ParseUint(s, 0, 32)
		if err != nil {
			tb.Fatalf("tshark: %q is no number", s)
		}
		return int(n)
	}
	fields := []struct {
		name string
		add  func(value string)
	}{
		{"iwarp_rdma.opcode", func(v string) { t.FPDUs[iwarpwire.Opcode(number(v))]++ }},
		{"smb_direct.preferred_send_size", func(string) { t.Negotiations++ }},
		{"smb_direct.data_offset", func(string) { t.Messages++ }},
	}
	args := []string{"-T", "fields", "-e", "iwarp_mpa.key.req", "-e", "iwarp_mpa.rev"}
	for _, f := range fields {
		args = append(args, "-e", f.name)
	}
	for line := range strings.Lines(tshark(tb, path, args...)) {
		columns := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(columns) != len(fields)+2 {
			tb.Fatalf("tshark: %d columns in %q", len(columns), line)
		}
		if isRequest, rev := columns[0] != "", columns[1]; isRequest {
			t.Requests[number(rev)]++
		} else if rev != "" {
			t.Replies[number(rev)]++
		}
		for i, f := range fields {
			for v := range strings.SplitSeq(columns[i+2], ",") {
				if v != "" {
					f.add(v)
				}
			}
		}
	}
}

// checksums counts tshark's verdicts on checksums. Only tshark's text output has them.
func (t *Tally) checksums(tb testing.TB, path string) {
	tb.Helper()
	for line := range strings.Lines(tshark(tb, path, "-V", "-O", "iwarp_mpa")) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "CRC check: ") && strings.Contains(line, "(Good CRC32)"):
			t.GoodCRC++
		case strings.HasPrefix(line, "CRC check: "):
			t.BadCRC++
		case strings.HasPrefix(line, "CRC: "):
			t.NoCRC++
		}
	}
}

// tshark returns its output for the capture at path. It does not use the user's
// preferences.
func tshark(tb testing.TB, path string, args ...string) string {
	tb.Helper()
	cmd := exec.Command("tshark", slices.Concat([]string{"-r", path}, options, args)...)
	home := tb.TempDir()
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME="+home)
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		tb.Fatalf("tshark: %v: %s", err, &complaints)
	}
	return string(out)
}

// String returns the counts in one line, for a log.
func (t *Tally) String() string {
	w := &strings.Builder{}
	fmt.Fprintf(w, "MPA requests by revision %v, FPDUs", t.Requests)
	for _, op := range slices.Sorted(maps.Keys(t.FPDUs)) {
		fmt.Fprintf(w, ", %v %d", op, t.FPDUs[op])
	}
	fmt.Fprintf(w, "; CRC good %d, bad %d, none %d; SMB Direct negotiations %d, messages %d; faults %d",
		t.GoodCRC, t.BadCRC, t.NoCRC, t.Negotiations, t.Messages, len(t.Faults))
	return w.String()
}
