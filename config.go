package rdmanet

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// Config adjusts connections. The zero value serves well; sizes that are out
// of range are refused by Dial and Listen, not silently changed. A Config must
// not be changed while a Dialer or ListenConfig that holds it is in use.
type Config struct {
	// Device names the device to use: "iwarp" is the software device, "rdma"
	// any RDMA device, and else it is one of those by its name, "mlx5_0" for
	// instance. Empty means the RDMA device that leads to the address if there
	// is one, then the software device; a Listener listens on both. The
	// environment variable RDMANET_DEVICE overrides it.
	Device string

	// RequireRDMA forbids the software device: without an RDMA device that
	// leads to the address Dial and Listen fail.
	RequireRDMA bool

	// Provider, if not nil, is where devices come from, and Device, RequireRDMA
	// and RDMANET_DEVICE are not looked at: for tests, and for a device that
	// was set up in a special way (see package ibv/rdmacore).
	Provider ibv.Provider

	// MaxSendSize and MaxReceiveSize bound a segment, one RDMA Send, in bytes,
	// headers included: 256 to 1 MiB. 0 means 65560 (64 KiB and a header) on
	// devices whose registered memory costs nothing until it is used, 8192 on
	// others. Each receive buffer has MaxReceiveSize bytes. To peers that are
	// not rdmanet at most 8136 are offered, the most that all known ones take.
	MaxSendSize    int
	MaxReceiveSize int

	// MaxFragmentedSize bounds a message that comes in segments, in bytes: 131080
	// to 1 GiB, 0 means 1 MiB. It concerns what the peer sends with WriteMsg; Write
	// and Read carry any amount. Between rdmanet peers longer messages go as large
	// transfers, unless TransferSize is negative on either side.
	MaxFragmentedSize int

	// TransferSize is the length in bytes from which Write and WriteMsg do not cut
	// data into segments but leave it to the devices to move by RDMA, between
	// rdmanet peers: 4096 to 1 GiB. Such a Write returns when the peer has taken
	// the data. 0 means 512 KiB on RDMA devices, and on the software device, which
	// sends straight from any memory, 4 MiB for what lies in a Buffer and else
	// never; ReadFrom, which need not wait, does so from 128 KiB on on RDMA devices.
	// Negative means never, for either direction.
	TransferSize int

	// NoRDMARead has large transfers go by RDMA Write, as they do where a device
	// cannot read.
	NoRDMARead bool

	// InitialReceiveCredits is how many receive buffers a connection starts
	// with and returns to when idle: 4 to 255, 0 means 4.
	// MaxReceiveCredits is how many it may grow to while the peer asks for
	// more and the reader keeps up: 4 to 255; 0 means as many as make 4 MiB,
	// at least 16.
	InitialReceiveCredits int
	MaxReceiveCredits     int

	// ReceiveMemory bounds the memory, in bytes, that the connections of a device
	// together have for receive buffers beyond twice InitialReceiveCredits each, which is
	// what an idle one may keep: 64 KiB to 1 TiB, 0 means 1 GiB. A connection that finds
	// it used up keeps the buffers that it has, and grows when others have given some
	// back, which they do when they idle. So however many peers send much and then hold
	// on to the buffers, they hold no more than that.
	ReceiveMemory int

	// SendCreditTarget is how many receive buffers the peer is asked for: 4 to
	// 255, 0 means 255.
	SendCreditTarget int

	// TransferMemory bounds the memory outside the Go heap, in bytes, that the
	// connections of a device together hold at a time to bring large writes from
	// and to ordinary memory on their way: 256 KiB to 1 GiB, 0 means 64 MiB. A
	// connection that finds it used up goes on by its segments and its receive
	// buffers. About a second after its last use the memory is given back.
	TransferMemory int

	// KeepAlive is the time without a word from the peer after which it is
	// asked for one; without an answer in the same time again, or 20 s if that
	// is less, the connection is broken. So when the link is cut Read and Write
	// fail within twice KeepAlive or KeepAlive and 20 s, with ETIMEDOUT, whatever
	// they were at. A program need not read for its side to answer: if need be its
	// device does. 0 means 120 s, negative never, which leaves it to the device;
	// see the package's comment.
	KeepAlive time.Duration

	// NegotiateTimeout bounds connection set-up after the address is known, on
	// either side. 0 means 120 s on the active side, where the context's
	// deadline applies as well, and 20 s on the passive side.
	NegotiateTimeout time.Duration

	// LingerTimeout bounds how long a connection goes on behind Close, which does not
	// wait for it, to bring what was written to the peer: it is given up when nothing
	// has moved for so long, and after twelve times as long in any case. 0 means 5 s;
	// negative gives up at once and may lose data. At most 4096 connections of a
	// process linger at a time. Where a call is in the middle of a large transfer when
	// Close is called, a peer that is silent for a second is given up. See Lingering.
	LingerTimeout time.Duration

	// BusyPoll is how long Read and Write poll for a completion before they
	// sleep. It trades processor time for latency. 0 means that on RDMA devices
	// a Read that waits for the answer to what was sent polls, for a millisecond
	// at most, where that has paid before and while fewer connections are being
	// served than half of GOMAXPROCS; one of a process does at a time. With a
	// negative BusyPoll none ever does.
	BusyPoll time.Duration

	// Logger receives at level Debug what fails: set-ups, connections, queue pairs for
	// datagrams, devices. It receives at level Warn a line for each Conn, Listener and
	// PacketConn that the program drops without Close. nil discards the former, and the
	// warnings go to slog.Default().
	Logger *slog.Logger
}

const (
	minSegment        = 256
	maxSegment        = 1 << 20
	plainSegment      = 8136 // Windows refuses a PreferredSendSize above
	pagedSegment      = 64<<10 + dataOffset
	pinnedSegment     = 8192
	plainReadWrite    = 8 << 20 // whether any is made is up to the program; Linux on siw cannot connect where none may be
	creditCeiling     = 255
	minTransfer       = 4096
	copiedTransfer    = 512 << 10 // below that waiting for the peer costs more than copying: docs/performance.md
	scratchTransfer   = 128 << 10
	inlineTransfer    = 4 << 20
	defaultFragmented = 1 << 20
	defaultTransfer   = 64 << 20
	leastWindows      = 64 << 10
	mostWindows       = min(1<<40, math.MaxInt)
	defaultWindows    = 1 << 30
	defaultLinger     = 5 * time.Second
)

var discardLogger = slog.New(slog.DiscardHandler)

// check reports what is out of range.
func (c *Config) check() error {
	var errs []error
	inRange := func(name string, v, lo, hi int) {
		if v != 0 && (v < lo || v > hi) {
			errs = append(errs, fmt.Errorf("rdmanet: Config.%s is %d: must be 0 or %d to %d", name, v, lo, hi))
		}
	}
	inRange("MaxSendSize", c.MaxSendSize, minSegment, maxSegment)
	inRange("MaxReceiveSize", c.MaxReceiveSize, minSegment, maxSegment)
	inRange("MaxFragmentedSize", c.MaxFragmentedSize, minFragmentedSize+8, sizeCeiling)
	if c.TransferSize > 0 {
		inRange("TransferSize", c.TransferSize, minTransfer, transferCeiling)
	}
	inRange("InitialReceiveCredits", c.InitialReceiveCredits, minCredits, creditCeiling)
	inRange("MaxReceiveCredits", c.MaxReceiveCredits, minCredits, creditCeiling)
	inRange("ReceiveMemory", c.ReceiveMemory, leastWindows, mostWindows)
	inRange("TransferMemory", c.TransferMemory, regmem.ChunkSize, sizeCeiling)
	inRange("SendCreditTarget", c.SendCreditTarget, minCredits, creditCeiling)
	return errors.Join(errs...)
}

// log tells the logger, if there is one, of an error.
func (c *Config) log(msg string, addr net.Addr, err error) {
	if c.Logger != nil {
		c.Logger.Debug("rdmanet: "+msg, "remote", addr, "err", err)
	}
}

// settings is a Config with the defaults for one device filled in.
type settings struct {
	maxSend, maxReceive, maxFragmented int
	initial, maximum, target           int // credits
	transfers                          bool
	transfer, ofBuffer, ofScratch      int // bytes from which a write is a transfer; one from a Buffer; ReadFrom's
	noRead                             bool
	transferMemory, receiveMemory      int
	keepAlive, probe, linger, busyPoll time.Duration
	negotiate                          time.Duration
	log                                *slog.Logger
	logger                             *slog.Logger // the program's, nil if it has set none
}

func (c *Config) settings(dev ibv.Device, passive bool) settings {
	segment := pagedSegment
	if regmem.PinsMemory(dev) {
		segment = pinnedSegment
	}
	transfer, ofBuffer, ofScratch := copiedTransfer, copiedTransfer, scratchTransfer
	if dev.Attr().MaxInline >= segment { // segments are sent from where the data lies
		transfer, ofBuffer, ofScratch = math.MaxInt, inlineTransfer, math.MaxInt
	}
	or := func(v, def int) int {
		if v == 0 {
			return def
		}
		return v
	}
	s := settings{
		maxSend:        or(c.MaxSendSize, segment),
		maxReceive:     or(c.MaxReceiveSize, segment),
		maxFragmented:  or(c.MaxFragmentedSize, defaultFragmented),
		target:         or(c.SendCreditTarget, creditCeiling),
		keepAlive:      c.KeepAlive,
		linger:         c.LingerTimeout,
		busyPoll:       c.BusyPoll,
		negotiate:      c.NegotiateTimeout,
		log:            c.Logger,
		logger:         c.Logger,
		transfers:      c.TransferSize >= 0,
		transfer:       or(c.TransferSize, transfer),
		ofBuffer:       or(c.TransferSize, ofBuffer),
		ofScratch:      or(c.TransferSize, ofScratch),
		noRead:         c.NoRDMARead,
		transferMemory: or(c.TransferMemory, defaultTransfer),
		receiveMemory:  or(c.ReceiveMemory, defaultWindows),
	}
	s.maximum = or(c.MaxReceiveCredits, min(creditCeiling, max(16, 4<<20/s.maxReceive)))
	s.initial = min(or(c.InitialReceiveCredits, 4), s.maximum)
	if s.keepAlive == 0 {
		s.keepAlive = 120 * time.Second
	}
	s.probe = min(s.keepAlive, 20*time.Second)
	if s.linger == 0 {
		s.linger = defaultLinger
	}
	if s.negotiate <= 0 {
		s.negotiate = 120 * time.Second
		if passive {
			s.negotiate = 20 * time.Second
		}
	}
	if s.log == nil {
		s.log = discardLogger
	}
	return s
}

// features is what the private data offers.
func (s *settings) features() uint16 {
	f := featureFIN | featureMessages
	if s.transfers {
		f |= featureTransfer
	}
	if s.noRead {
		f |= featureNoRead
	}
	return f
}

// limits is what the two of them offer in negotiation to a peer, which is
// rdmanet or not.
func (s *settings) limits(peer privateData) limits {
	l := limits{
		maxSend:          uint32(s.maxSend),
		maxReceive:       uint32(s.maxReceive),
		maxFragmented:    uint32(s.maxFragmented),
		creditsRequested: uint16(s.target),
		creditsGranted:   uint16(s.maximum),
		maxReadWrite:     plainReadWrite,
	}
	if !peer.rdmanet {
		l.maxSend = min(l.maxSend, plainSegment)
		l.maxReceive = min(l.maxReceive, plainSegment)
	}
	return l
}
