// Command rdmadump shows the RDMA messages in a packet capture of RoCEv2 or iWARP. It also
// shows the messages of SMB Direct, rdmanet's streams and RPC-over-RDMA in them.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"

	"github.com/rdmanet/rdmanet/capture"
)

// options are the flags.
type options struct {
	file     string
	upper    bool
	json     bool
	stats    bool
	plot     string
	follow   string
	protocol string
	filter   filter
	ignore   bool
	window   int
	memory   int // memory is in MiB.
	progress bool

	interrupt chan os.Signal // interrupt ends the reading. A second interrupt ends the program.
}

func main() {
	var o options
	var addr, qp string
	flag.BoolVar(&o.upper, "upper", false, "show the messages of upper layers instead of the operations of RDMA")
	flag.BoolVar(&o.json, "json", false, "a JSON object a line; with -stats, one for everything")
	flag.BoolVar(&o.stats, "stats", false, "a summary instead of messages")
	flag.StringVar(&o.plot, "plot", "", "with -stats: draw throughput and credits over time into this SVG `file`")
	flag.StringVar(&o.follow, "follow", "", "write what each side of each connection sent to files in this `directory`")
	flag.StringVar(&o.protocol, "protocol", "detect", "what Sends carry: smbdirect, rpcrdma, none, or detect")
	flag.StringVar(&addr, "addr", "", "only connections of this IP `address`")
	flag.IntVar(&o.filter.port, "port", 0, "only connections of this `port`")
	flag.StringVar(&qp, "qp", "", "only connections of the QP with this `number`, hexadecimal with 0x")
	flag.BoolVar(&o.ignore, "k", false, "use packets with wrong checksums too")
	flag.IntVar(&o.window, "window", 0, "`packets` that may overtake one before it counts as lost; 0 is 1024")
	flag.IntVar(&o.memory, "memory", 256, "`MiB` to keep of what is not complete")
	flag.Usage = usage
	flag.Parse()
	err := o.filter.parse(addr, qp)
	if err == nil {
		err = o.check(flag.Args())
	}
	if err == nil {
		o.file, o.progress, o.interrupt = flag.Arg(0), true, make(chan os.Signal, 1)
		signal.Notify(o.interrupt, os.Interrupt)
		err = run(&o, os.Stdin, os.Stdout, os.Stderr)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "rdmadump: %v\n", err)
		os.Exit(1)
	}
}

// check finds what is wrong with the flags and the arguments behind them.
func (o *options) check(args []string) error {
	switch {
	case len(args) > 1 && strings.HasPrefix(args[1], "-"):
		return fmt.Errorf("flags go in front of the file: %s", args[1])
	case len(args) > 1:
		return errors.New("one file at a time")
	case o.plot != "" && !o.stats:
		return errors.New("-plot needs -stats")
	case o.memory < 1 || o.memory > math.MaxInt>>20:
		return fmt.Errorf("-memory %d: from 1 to %d", o.memory, math.MaxInt>>20)
	case o.window < 0:
		return fmt.Errorf("-window %d: less than nothing", o.window)
	}
	return nil
}

func usage() {
	fmt.Fprint(flag.CommandLine.Output(), `usage: rdmadump [flags] [file]

Reads pcap or pcapng, also compressed with gzip, from the file or standard
input, and prints a line for each message. An interrupt ends the reading, and
shows what there was; a second one ends the program.

`)
	flag.PrintDefaults()
}

// run does what the flags ask for. If it returns the error of a damaged file, it has shown
// all that could be read.
func run(o *options, stdin io.Reader, stdout, stderr io.Writer) error {
	src, err := open(o.file, stdin)
	if err != nil {
		return err
	}
	defer src.close()

	out := bufio.NewWriterSize(stdout, 64<<10)
	defer out.Flush()
	src.idle = func() { out.Flush() } // The lines so far are shown before the program waits for packets.
	if o.interrupt != nil {
		go func() {
			<-o.interrupt
			signal.Stop(o.interrupt)
			src.stop.Store(true)
		}()
	}
	cfg := capture.Config{IgnoreChecksums: o.ignore, Window: o.window, Memory: o.memory << 20}
	if cfg.Protocol, err = protocol(o.protocol); err != nil {
		return err
	}
	lost := &losses{filter: &o.filter}
	cfg.Loss = lost.add
	show := &printer{w: out, filter: &o.filter, json: o.json}
	var sum *summary
	if o.stats {
		sum = newSummary(&o.filter, o.plot != "")
		cfg.Message, cfg.Credit, cfg.Upper = sum.message, sum.credit, sum.upper
	} else if o.upper {
		cfg.Upper, cfg.Loss = show.upper, func(l capture.Loss) { lost.add(l); show.loss(l) }
	} else {
		cfg.Message, cfg.Loss = show.message, func(l capture.Loss) { lost.add(l); show.loss(l) }
	}
	var follow *follower
	if o.follow != "" {
		if follow, err = newFollower(o.follow, &o.filter); err != nil {
			return err
		}
		cfg.Data = true
		follow.chain(&cfg)
	}

	r := capture.NewReassembler(cfg)
	bar := newProgress(o.progress, src, stderr)
	readErr := src.each(func(p *capture.Packet) {
		if show.begun.IsZero() {
			show.begun = p.Time
		}
		if sum != nil {
			sum.packet(p)
		}
		r.Add(p)
		bar.step()
	})
	bar.done()
	r.Flush()
	s := r.Stats()
	if sum != nil {
		err = sum.print(out, o, &s, lost)
	}
	if follow != nil {
		err = errors.Join(err, follow.close())
	}
	if readErr != nil {
		readErr = fmt.Errorf("%s: %w", src.name, readErr)
	}
	err = errors.Join(err, out.Flush())
	if !o.stats {
		lost.report(stderr, &s)
	}
	return errors.Join(readErr, err)
}

func protocol(name string) (capture.Protocol, error) {
	switch name {
	case "", "detect":
		return capture.Detect, nil
	case "smbdirect":
		return capture.SMBDirect, nil
	case "rpcrdma":
		return capture.RPCRDMA, nil
	case "none":
		return capture.Unknown, nil
	}
	return 0, fmt.Errorf("-protocol %q: want smbdirect, rpcrdma, none or detect", name)
}

// filter chooses the connections to show.
type filter struct {
	addr netip.Addr
	port int
	qp   uint32
	all  bool // all is set if all connections are to be shown.
}

func (f *filter) parse(addr, qp string) (err error) {
	if addr != "" {
		if f.addr, err = netip.ParseAddr(addr); err != nil {
			return fmt.Errorf("-addr: %w", err)
		}
		f.addr = f.addr.Unmap()
	}
	if f.port < 0 || f.port > math.MaxUint16 {
		return fmt.Errorf("-port %d: not the number of a port", f.port)
	}
	if qp != "" {
		digits, base := qp, 10
		if hex, ok := strings.CutPrefix(strings.ToLower(qp), "0x"); ok {
			digits, base = hex, 16
		}
		n, err := strconv.ParseUint(digits, base, 24)
		if err != nil || n == 0 {
			return fmt.Errorf("-qp %q: not the number of a QP", qp)
		}
		f.qp = uint32(n)
	}
	f.all = addr == "" && qp == "" && f.port == 0
	return nil
}

// match tells whether one end of c matches all flags.
func (f *filter) match(c *capture.Conn) bool {
	if f.all {
		return true
	}
	for i := range c.Ends {
		e := &c.Ends[i]
		if (!f.addr.IsValid() || e.Addr.Addr() == f.addr) &&
			(f.port == 0 || int(e.Addr.Port()) == f.port) && (f.qp == 0 || e.QP == f.qp) {
			return true
		}
	}
	return false
}

// losses counts what is missing.
type losses struct {
	filter *filter
	counts [capture.AnswersLost + 1]struct{ times, sum uint64 }
}

func (l *losses) add(x capture.Loss) {
	if x.Conn == nil || l.filter.match(x.Conn) {
		l.counts[x.What].times++
		l.counts[x.What].sum += x.Count
	}
}

// lines describes what is missing. It returns no lines if nothing is.
func (l *losses) lines(s *capture.Stats) (lines []string) {
	say := func(n uint64, format string, args ...any) {
		if n > 0 {
			lines = append(lines, fmt.Sprintf(format, args...))
		}
	}
	c := l.counts
	say(c[capture.PacketsLost].times, "%d gaps of %d PSNs in RoCE", c[capture.PacketsLost].times, c[capture.PacketsLost].sum)
	say(c[capture.BytesLost].times, "%d gaps of %d bytes in TCP streams", c[capture.BytesLost].times, c[capture.BytesLost].sum)
	say(c[capture.ResponsesLost].times, "%d bytes of Reads whose requests are missing", c[capture.ResponsesLost].sum)
	say(c[capture.StreamLost].times, "%d TCP streams in which no FPDU was found again", c[capture.StreamLost].times)
	say(c[capture.Restarted].times, "%d times that PSNs jumped", c[capture.Restarted].times)
	say(c[capture.MemoryShort].times, "%d bytes let go for want of memory (-memory)", c[capture.MemoryShort].sum)
	say(c[capture.AnswersLost].times, "%d requests given up, because no answer to them was captured", c[capture.AnswersLost].sum)
	say(s.BadICRC+s.BadCRC, "%d packets and %d FPDUs with wrong checksums (-k uses them)", s.BadICRC, s.BadCRC)
	say(s.CutShort, "%d packets cut short when they were captured", s.CutShort)
	say(s.BadHeader+s.Broken+s.Fragments, "%d packets or FPDUs that make no sense, %d IP fragments", s.BadHeader+s.Broken, s.Fragments)
	say(s.OtherLinks, "%d packets of a link type that is not understood, the last of type %d", s.OtherLinks, s.OtherLink)
	say(s.Evicted, "%d connections given up because there are too many", s.Evicted)
	if s.Packets > 0 && s.Conns == 0 && s.RoCE == 0 {
		lines = append(lines, fmt.Sprintf("no RDMA to be found in %d packets", s.Packets))
	}
	return lines
}

func (l *losses) report(w io.Writer, s *capture.Stats) {
	for _, line := range l.lines(s) {
		fmt.Fprintf(w, "rdmadump: %s\n", line)
	}
}
