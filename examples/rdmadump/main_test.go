package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

func captureFile(name string) string {
	return filepath.Join("..", "..", "testdata", "captures", name)
}

// dump runs the program and returns what it prints.
func dump(t *testing.T, o options, stdin io.Reader) (stdout, stderr string, err error) {
	t.Helper()
	o.filter.all = !o.filter.addr.IsValid() && o.filter.port == 0 && o.filter.qp == 0
	if o.memory == 0 {
		o.memory = 64
	}
	var out, complaints bytes.Buffer
	err = run(&o, stdin, &out, &complaints)
	return out.String(), complaints.String(), err
}

func lines(s string) int { return strings.Count(s, "\n") }

func TestLines(t *testing.T) {
	for _, tt := range []struct {
		file         string
		upper        bool
		lines        int
		first, other string
	}{
		{"rxe-rping.pcap", false, 29, "REQ", "key 0x00000587"},
		{"rxe-nfs.pcap", false, 107, "REQ", "invalidates"},
		{"rxe-nfs.pcap", true, 80, "RPC-over-RDMA Call", "read chunk of 70001 at"},
		{"siw-smbdirect.pcap", true, 72, "SMB Direct Negotiation 20 bytes, complete", "Transfer 131072 bytes"},
		{"siw-terminate.pcap", false, 5, "StartRequest", "DDP tagged buffer error: base or bounds violation"},
		{"rxe-transfers.pcap", true, 67, "SMB Direct ", "Transfer 15062 bytes, key 0x000073ac at 0x34ab06d97f58, transfer 3 by RDMA Read, complete"},
		{"siw-transfers.pcap", true, 69, "SMB Direct ", "transfer 2 by RDMA Write, withdrawn, complete"},
	} {
		out, complaints, err := dump(t, options{file: captureFile(tt.file), upper: tt.upper}, nil)
		if err != nil || complaints != "" {
			t.Errorf("%s: %v, %s", tt.file, err, complaints)
		}
		first, _, _ := strings.Cut(out, "\n")
		if lines(out) != tt.lines || !strings.Contains(first, tt.first) || !strings.Contains(out, tt.other) {
			t.Errorf("%s: %d lines, want %d, with %q and %q:\n%s", tt.file, lines(out), tt.lines, tt.first, tt.other, out)
		}
		if strings.Contains(out, "NOT COMPLETE") {
			t.Errorf("%s: something is not complete:\n%s", tt.file, out)
		}
	}
}

// rewrite returns a capture as pcapng, or compressed.
func rewrite(t *testing.T, file, form string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(form, "ng") {
		r, err := pcapgo.NewReader(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		var ng bytes.Buffer
		w, err := pcapgo.NewNgWriter(&ng, layers.LinkTypeEthernet)
		if err != nil {
			t.Fatal(err)
		}
		for {
			data, ci, err := r.ReadPacketData()
			if errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			if err := w.WritePacket(gopacket.CaptureInfo{Timestamp: ci.Timestamp, CaptureLength: len(data), Length: ci.Length}, data); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		b = ng.Bytes()
	}
	if strings.Contains(form, "gz") {
		var z bytes.Buffer
		w := gzip.NewWriter(&z)
		w.Write(b)
		w.Close()
		b = z.Bytes()
	}
	return b
}

func TestForms(t *testing.T) {
	const file = "rxe-write.pcap"
	want, _, err := dump(t, options{file: captureFile(file)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, form := range []string{"pcap", "pcap gz", "ng", "ng gz"} {
		b := rewrite(t, captureFile(file), form)
		got, _, err := dump(t, options{}, bytes.NewReader(b))
		if err != nil || got != want {
			t.Errorf("%s from standard input: %v, %d lines, want %d", form, err, lines(got), lines(want))
		}
		path := filepath.Join(t.TempDir(), "capture")
		if err := os.WriteFile(path, b, 0o666); err != nil {
			t.Fatal(err)
		}
		if got, _, err := dump(t, options{file: path}, nil); err != nil || got != want {
			t.Errorf("%s: %v, %d lines, want %d", form, err, lines(got), lines(want))
		}
	}
}

// Of a file that ends too early, or is damaged, there is what comes before, and
// an error that says where.
func TestDamaged(t *testing.T) {
	const file = "rxe-write.pcap"
	want, _, _ := dump(t, options{file: captureFile(file)}, nil)
	for _, form := range []string{"pcap", "ng", "pcap gz"} {
		b := rewrite(t, captureFile(file), form)
		got, _, err := dump(t, options{}, bytes.NewReader(b[:len(b)/2]))
		if err == nil || !strings.Contains(err.Error(), "packet") {
			t.Errorf("%s, half of it: %v", form, err)
		}
		if n := lines(got); n < 20 || n >= lines(want) {
			t.Errorf("%s, half of it: %d lines, the whole has %d", form, n, lines(want))
		}
	}
	b := rewrite(t, captureFile(file), "pcap")
	copy(b[len(b)/2:], bytes.Repeat([]byte{0xff}, 4000))
	if got, complaints, err := dump(t, options{}, bytes.NewReader(b)); err == nil && complaints == "" || lines(got) < 20 {
		t.Errorf("damaged: %v, %q, %d lines", err, complaints, lines(got))
	}
	for name, b := range map[string][]byte{"empty": nil, "text": []byte("not a capture at all"), "short": {1, 2, 3}} {
		if _, _, err := dump(t, options{}, bytes.NewReader(b)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, _, err := dump(t, options{file: "no such file"}, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// Wherever a file is cut but between two packets, there is an error.
func TestCut(t *testing.T) {
	plain := rewrite(t, captureFile("siw-rping.pcap"), "pcap")[:24+5*16+4*74]
	for head, b := range map[int][]byte{16: plain, 24: kuznetzov(plain[:24+4*16+4*74])} {
		ends := map[int]bool{24: true}
		for at := 24; at+head <= len(b); {
			at += head + int(b[at+8])
			ends[at] = true
		}
		for n := 4; n <= len(b); n++ {
			if _, _, err := dump(t, options{}, bytes.NewReader(b[:n])); (err == nil) != ends[n] {
				t.Errorf("headers of %d, %d bytes: %v", head, n, err)
			}
		}
	}
}

// Whatever number stands in a header, it is an error at most.
func TestDamagedNumbers(t *testing.T) {
	for _, form := range []string{"pcap", "ng"} {
		whole := rewrite(t, captureFile("siw-rping.pcap"), form)
		for at := 4; at < 320; at += 4 { // the headers of the file and of two packets
			for _, v := range []uint32{0, 1, 1<<31 - 1, 1 << 31, 0xfffffff0, 1<<32 - 1} {
				b := bytes.Clone(whole)
				binary.LittleEndian.PutUint32(b[at:], v)
				out, complaints, err := dump(t, options{}, bytes.NewReader(b))
				if err == nil && complaints == "" && lines(out) < 20 {
					t.Errorf("%s, 0x%x at %d: %d lines, and no word why", form, v, at, lines(out))
				}
			}
		}
	}
}

// What is missing has a line where that was found out, and is in the message
// that it is missing from.
func TestMissing(t *testing.T) {
	b := rewrite(t, captureFile("rxe-write.pcap"), "pcap")
	out := bytes.Clone(b[:24])
	dropped := false
	for b = b[24:]; len(b) > 0; {
		n := 16 + int(b[8]) + int(b[9])<<8
		if b[16+42] == 0x07 && !dropped { // an RDMA WRITE Middle
			dropped = true
		} else {
			out = append(out, b[:n]...)
		}
		b = b[n:]
	}
	got, complaints, err := dump(t, options{}, bytes.NewReader(out))
	for _, want := range []string{"LOSS: PSN 9449753 is missing\n", "NOT COMPLETE: [1024, 2048) missing, 3977 of 5001 bytes there\n"} {
		if err != nil || strings.Count(got, want) != 1 {
			t.Errorf("no %q: %v\n%s", want, err, got)
		}
	}
	if complaints != "rdmadump: 1 gaps of 1 PSNs in RoCE\n" {
		t.Errorf("%q", complaints)
	}
}

// Packets of one direction, without the set-up, belong to a connection whose other
// direction is not known.
func TestUnpaired(t *testing.T) {
	b, err := os.ReadFile(captureFile("rxe-rping.pcap"))
	if err != nil {
		t.Fatal(err)
	}
	out := b[:24:24]
	first := ""
	for b = b[24:]; len(b) > 0; {
		n := 16 + int(b[8]) + int(b[9])<<8
		frame := b[16:n]
		from, qp := string(frame[26:30]), frame[42+5:42+8]
		if !bytes.Equal(qp, []byte{0, 0, 1}) && (first == "" || from == first) {
			first = from
			out = append(out, b[:n]...)
		}
		b = b[n:]
	}
	got, _, err := dump(t, options{stats: true}, bytes.NewReader(out))
	if err != nil || strings.Count(got, ", unpaired: ") != 1 {
		t.Errorf("%v\n%s", err, got)
	}
	got, _, err = dump(t, options{stats: true, json: true}, bytes.NewReader(out))
	if err != nil || strings.Count(got, `"unpaired":true`) != 1 {
		t.Errorf("%v\n%s", err, got)
	}
	got, _, err = dump(t, options{stats: true, file: captureFile("rxe-rping.pcap")}, nil)
	if err != nil || strings.Contains(got, "unpaired") {
		t.Errorf("%v\n%s", err, got)
	}
}

func TestFilter(t *testing.T) {
	const file = "rxe-send8k.pcap"
	all, _, _ := dump(t, options{file: captureFile(file)}, nil)
	for _, tt := range []struct {
		addr, qp string
		port     int
		some     bool // of the lines, not all and not none
		none     bool
	}{
		{addr: "10.77.0.2"},
		{addr: "10.77.0.9", none: true},
		{qp: "0x12", some: true},
		{qp: "4095", none: true},
		{port: 1, none: true},
	} {
		o := options{file: captureFile(file)}
		if err := o.filter.parse(tt.addr, tt.qp); err != nil {
			t.Fatal(err)
		}
		o.filter.port = tt.port
		out, _, err := dump(t, o, nil)
		n := lines(out)
		if err != nil || tt.none != (n == 0) || tt.some != (n > 0 && n < lines(all)) {
			t.Errorf("%+v: %v, %d lines of %d", tt, err, n, lines(all))
		}
	}
	for _, qp := range []string{"18", "018", "0x12", "0X12"} {
		var f filter
		if err := f.parse("::ffff:10.77.0.2", qp); err != nil || f.qp != 18 || f.addr.String() != "10.77.0.2" {
			t.Errorf("QP %s: %v, %+v", qp, err, f)
		}
	}
	for _, port := range []int{-1, 1 << 16} {
		if f := (filter{port: port}); f.parse("", "") == nil {
			t.Errorf("port %d: no error", port)
		}
	}
	var f filter
	for _, bad := range [][2]string{{"nonsense", ""}, {"", "nonsense"}, {"", "0"}, {"", "0x1000000"}} {
		if f.parse(bad[0], bad[1]) == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func TestJSON(t *testing.T) {
	out, _, err := dump(t, options{file: captureFile("rxe-nfs.pcap"), json: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	writes := 0
	for d := json.NewDecoder(strings.NewReader(out)); ; {
		var l line
		if err := d.Decode(&l); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if l.Time.IsZero() || l.Conn != 1 || l.From == "" || !l.Complete {
			t.Errorf("%+v", l)
		}
		if l.Kind == "Write" {
			writes++
		}
	}
	if writes != 18 {
		t.Errorf("%d Writes, want 18", writes)
	}
}

// What a damaged file says of the time is not a reason to keep a message back.
func TestJSONTime(t *testing.T) {
	for _, year := range []int{-400, 1970, 9999, 10000, 300000} {
		var out bytes.Buffer
		p := printer{w: &out, json: true}
		p.print(&line{Time: time.Date(year, 6, 1, 0, 0, 0, 0, time.UTC), Kind: "Send"})
		var l line
		if err := json.Unmarshal(out.Bytes(), &l); err != nil || l.Kind != "Send" {
			t.Errorf("year %d: %v, %q", year, err, out.String())
		}
	}
}

// Flags that cannot be meant are refused, and said to be.
func TestCheck(t *testing.T) {
	for _, tt := range []struct {
		o    options
		args []string
		want string
	}{
		{options{memory: 256}, nil, ""},
		{options{memory: 1, window: 5, stats: true, plot: "x"}, []string{"file"}, ""},
		{options{memory: 256}, []string{"file", "-json"}, "flags go in front of the file: -json"},
		{options{memory: 256}, []string{"file", "another"}, "one file"},
		{options{memory: 256, plot: "x"}, nil, "-plot needs -stats"},
		{options{memory: 0}, nil, "-memory 0"},
		{options{memory: -5}, nil, "-memory -5"},
		{options{memory: math.MaxInt>>20 + 1}, nil, "-memory"},
		{options{memory: 256, window: -1}, nil, "-window -1"},
	} {
		err := tt.o.check(tt.args)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%+v %v: %v, want %q", tt.o, tt.args, err, tt.want)
		}
	}
}

// Who sees no message learns why.
func TestNothing(t *testing.T) {
	b := rewrite(t, captureFile("rxe-rping.pcap"), "pcap")
	other := bytes.Clone(b)
	other[20] = 247 // InfiniBand
	foreign := bytes.Clone(b[:24+16+int(b[24+8])+int(b[24+9])<<8])
	foreign[24+16+37] = 53 // not the UDP port of RoCEv2
	for _, tt := range []struct {
		b    []byte
		want string
	}{
		{other, "rdmadump: 53 packets of a link type that is not understood, the last of type 247\nrdmadump: no RDMA to be found in 53 packets\n"},
		{foreign, "rdmadump: no RDMA to be found in 1 packets\n"},
	} {
		out, complaints, err := dump(t, options{}, bytes.NewReader(tt.b))
		if err != nil || out != "" || complaints != tt.want {
			t.Errorf("%v, %q, %q, want %q", err, out, complaints, tt.want)
		}
	}
}

func TestStats(t *testing.T) {
	plot := filepath.Join(t.TempDir(), "plot.svg")
	o := options{file: captureFile("siw-smbdirect.pcap"), stats: true, json: true, plot: plot}
	out, _, err := dump(t, o, nil)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	if r.Packets != 727 || r.FPDUs["RDMA Write"] != 192 || len(r.Connections) != 1 || len(r.Losses) != 0 {
		t.Errorf("%+v", r)
	}
	c := r.Connections[0]
	if c.Protocol != "SMB Direct" || c.Upper["Payload"] != 64 || c.Upper["Transfer"] != 3 || c.Sides[1].Messages["Write"] != 16 {
		t.Errorf("%+v", c)
	}
	if k := c.Sides[1].Credits; k == nil || k[0] < 0 || k[1] > 255 {
		t.Errorf("credits %v", k)
	}
	if l := c.Sides[1].Latency; l == nil || l.Count != 1 || l.Min > l.Mean || l.Mean > l.Max {
		t.Errorf("latency %+v", l)
	}
	svg, err := os.ReadFile(plot)
	if err != nil {
		t.Fatal(err)
	}
	lines := 0
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := d.Token()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "polyline" {
			lines++
		}
	}
	if lines != 4 {
		t.Errorf("%d curves, want throughput and credits of both sides", lines)
	}

	for _, o.json = range []bool{false, true} { // a plot that cannot be written costs no summary
		o.plot = filepath.Join(t.TempDir(), "no such directory", "plot.svg")
		if out, _, err := dump(t, o, nil); !errors.Is(err, os.ErrNotExist) || !strings.Contains(out, "RDMA Write") {
			t.Errorf("%v, %q", err, out)
		}
	}

	text, _, err := dump(t, options{file: captureFile("rxe-nfs.pcap"), stats: true}, nil)
	for _, want := range []string{"374 packets", "RC RDMA WRITE Middle 91", "#1 RoCEv2, RPC-over-RDMA, MTU 1024", "Call 40, Reply 40", "latency of"} {
		if err != nil || !strings.Contains(text, want) {
			t.Errorf("no %q: %v\n%s", want, err, text)
		}
	}
}

// -follow writes what the files were on the machines.
func TestFollow(t *testing.T) {
	sum := func(parts ...string) string {
		h := sha256.New()
		for _, p := range parts {
			b, err := os.ReadFile(p)
			if err != nil {
				t.Error(err)
			}
			h.Write(b)
		}
		return hex.EncodeToString(h.Sum(nil))
	}
	for _, tt := range []struct {
		file, pattern, digest string
	}{
		{"siw-smbdirect.pcap", "conn1-initiator-*.transfer", "b6dc9c1655a5cbe348859c0bbc710b2ad4f036be5a40a7b5b821745d4b74adae"},
		{"siw-smbdirect.pcap", "conn1-responder-*.transfer", "d8fe9cc483cb1a3fab005f6c26718c2f07c07f7c74176ddc44fdcda11388c721"},
	} {
		dir := t.TempDir()
		if _, _, err := dump(t, options{file: captureFile(tt.file), follow: dir, stats: true}, nil); err != nil {
			t.Fatal(err)
		}
		parts, _ := filepath.Glob(filepath.Join(dir, tt.pattern))
		if got := sum(parts...); got != tt.digest {
			t.Errorf("%s: %v: digest %s", tt.file, parts, got)
		}
		if gaps, _ := filepath.Glob(filepath.Join(dir, "*.gaps")); len(gaps) != 0 {
			t.Errorf("%s: %v", tt.file, gaps)
		}
		if _, _, err := dump(t, options{file: captureFile(tt.file), follow: dir}, nil); err == nil {
			t.Error("files of an earlier run were added to")
		}
	}
	odd := filepath.Join(t.TempDir(), "run [1]") // no pattern, though it looks like one
	for i := range 2 {
		if _, _, err := dump(t, options{file: captureFile("rxe-rping.pcap"), follow: odd}, nil); (err == nil) != (i == 0) {
			t.Errorf("run %d into one directory: %v", i+1, err)
		}
	}
	dir := t.TempDir()
	if _, _, err := dump(t, options{file: captureFile("rxe-nfs.pcap"), follow: dir}, nil); err != nil {
		t.Fatal(err)
	}
	chunks, _ := filepath.Glob(filepath.Join(dir, "*.chunk"))
	found := false
	for i := range chunks {
		for j := range chunks {
			found = found || i != j && sum(chunks[i], chunks[j]) == "949acfaff4842a26314fe12b76c52cf97428a9300f0e050878a2870d9aa6a5e6"
		}
	}
	if !found || len(chunks) != 3 {
		t.Errorf("readme.bin is not among %v", chunks)
	}
}

// A stream of rdmanet's has what went by RDMA in its place.
func TestFollowStream(t *testing.T) {
	content := func(n int, seed byte) []byte {
		b := make([]byte, n)
		rand.NewChaCha8([32]byte{seed}).Read(b)
		return b
	}
	up, down := content(60<<10+17, 'u'), content(30<<10+5, 'd')
	for _, file := range []string{"rxe-transfers.pcap", "siw-transfers.pcap"} {
		dir := t.TempDir()
		out, _, err := dump(t, options{file: captureFile(file), follow: dir, upper: true, json: true}, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, conn := range []string{"conn1", "conn2"} { // by RDMA Read, and by RDMA Write
			for side, want := range map[string][]byte{"initiator": up, "responder": down} {
				if got, err := os.ReadFile(filepath.Join(dir, conn+"-"+side+".bin")); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %s of %s: %v, %d bytes, want %d, or others", file, side, conn, err, len(got), len(want))
				}
			}
		}
		if files, _ := filepath.Glob(filepath.Join(dir, "*")); len(files) != 4 {
			t.Errorf("%s: %v", file, files)
		}
		ops := map[string]int{}
		for d := json.NewDecoder(strings.NewReader(out)); ; {
			var l line
			if err := d.Decode(&l); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			if l.Transfer != nil {
				ops[l.Transfer.Op]++
				if l.Transfer.ID == 0 || (l.Transfer.Op == "offer" || l.Transfer.Op == "grant") != (l.Key != "") {
					t.Errorf("%+v", l)
				}
			}
		}
		for _, op := range []string{"offer", "request", "grant", "written", "done", "withdraw"} {
			if ops[op] == 0 {
				t.Errorf("%s: no %s among %v", file, op, ops)
			}
		}
	}
}

// A series of any length has a bounded number of bins, and loses nothing.
func TestSeries(t *testing.T) {
	var sum, low series
	for i := range 10000 {
		at := time.Duration(i) * 7 * time.Millisecond
		sum.add(at, 2, false)
		low.add(at, float64(i%13), true)
	}
	total := 0.0
	for _, v := range sum.bins {
		total += v
	}
	if len(sum.bins) > maxBins || total != 20000 {
		t.Errorf("%d bins, sum %v", len(sum.bins), total)
	}
	for i, v := range low.bins {
		if low.set[i] && v != 0 && i < len(low.bins)-1 {
			t.Errorf("bin %d: lowest %v", i, v)
		}
	}
}

// What a damaged file says of the time may be any number of bins away.
func TestSeriesFar(t *testing.T) {
	for _, at := range []time.Duration{1 << 62, math.MaxInt64, 0x18ea0165e3aebbc0, 0x7fffffff * time.Millisecond, 1 << 32 * time.Millisecond, -5} {
		var s series
		s.add(0, 1, false)
		s.add(at, 2, false)
		s.add(at/2, 4, false)
		total := 0.0
		for _, v := range s.bins {
			total += v
		}
		if last := len(s.bins) - 1; last >= maxBins || at > 0 && s.bins[last] != 2 || total != 7 {
			t.Errorf("%d: %d bins, sum %v", at, len(s.bins), total)
		}
	}
}

// The bar shows how far the file was read, and goes away.
func TestProgress(t *testing.T) {
	var out bytes.Buffer
	p := &progress{w: &out, src: &source{size: 200, read: 50}, begun: time.Unix(0, 0)}
	p.draw(time.Unix(1, 0))
	p.done()
	if !strings.Contains(out.String(), "[##########..............................]  25 %") || !strings.HasSuffix(out.String(), " \r") {
		t.Errorf("%q", out.String())
	}
	if newProgress(true, &source{size: 1 << 30}, &out).w != nil {
		t.Error("a bar where there is no terminal")
	}
}
