package fabric

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// Fabric is a provider with one device, by which everybody who uses it reaches
// everybody else. Use [New]. All methods may be called by several goroutines at once.
type Fabric struct {
	dev   device
	addrs []netip.Addr

	split bool
	pins  bool

	gate    sync.RWMutex
	regions regions // below gate

	mu       sync.Mutex
	mtu      int
	lastQPN  uint32
	rcQPs    map[*rcQP]struct{}
	udQPs    map[uint32]*udQP // by number
	tcp, udp portSpace
	removed  bool

	// For datagrams.
	asked   int
	lost    int
	mute    bool
	deaf    bool
	stalled bool
}

// New returns a fabric whose device has the addresses.
func New(mtu int, addrs ...netip.Addr) *Fabric {
	f := &Fabric{mtu: mtu, addrs: addrs, lastQPN: 16, rcQPs: make(map[*rcQP]struct{}), udQPs: make(map[uint32]*udQP),
		tcp: newPortSpace(firstPort), udp: newPortSpace(firstPortUD)}
	f.dev.f = f
	return f
}

// Split gives each address a port of the device to itself. It is for a fabric that nobody
// uses yet.
func (f *Fabric) Split() { f.split = true }

// PinMemory has the device say that registered memory stays resident, and that waiters are
// woken by events, as RDMA devices do. It is for a fabric that nobody uses yet.
func (f *Fabric) PinMemory() { f.pins = true }

func (f *Fabric) ports() int {
	if f.split {
		return len(f.addrs)
	}
	return 1
}

// portOf is the port that has an address.
func (f *Fabric) portOf(a netip.Addr) int {
	if f.split {
		return 1 + slices.Index(f.addrs, a)
	}
	return 1
}

// Mute makes questions which queue pair serves an address go unanswered, as long as
// they are asked meanwhile.
func (f *Fabric) Mute(on bool) { f.set(&f.mute, on) }

// Deaf makes all datagrams get lost.
func (f *Fabric) Deaf(on bool) { f.set(&f.deaf, on) }

// Stall makes datagrams stay in their send queues until it is over.
func (f *Fabric) Stall(on bool) {
	f.set(&f.stalled, on)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.udQPs {
		q.run()
	}
}

// Break moves a queue pair for datagrams to the error state, as a device does that has failed
// to carry out a request.
func (f *Fabric) Break(qpn uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.udQPs[qpn]
	if q == nil {
		return ibv.ErrState
	}
	q.fail()
	return nil
}

func (f *Fabric) set(what *bool, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	*what = on
}

// SetMTU changes the port's MTU, in bytes.
func (f *Fabric) SetMTU(mtu int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mtu = mtu
}

func (f *Fabric) pathMTU() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mtu
}

// Asked is how often somebody asked which queue pair serves an address.
func (f *Fabric) Asked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked
}

// Lost is how many datagrams found no queue pair, no receive, or another key.
func (f *Fabric) Lost() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lost
}

// Remove removes the device. The IDs that have queue pairs get the event, and listeners
// fail.
func (f *Fabric) Remove() {
	f.mu.Lock()
	f.removed = true
	var ids []*id
	for q := range f.rcQPs {
		ids = append(ids, &q.id.id)
	}
	for _, q := range f.udQPs {
		ids = append(ids, &q.id.id)
	}
	for _, space := range []*portSpace{&f.tcp, &f.udp} {
		for _, l := range space.bound {
			if l != nil {
				l.remove()
			}
		}
	}
	f.mu.Unlock()
	for _, i := range ids {
		i.raise(ibv.Event{Kind: ibv.EventDeviceRemoval, Err: errno.ENODEV})
	}
}

// Name returns "fabric".
func (f *Fabric) Name() string { return providerName }

// Attr returns the zero value, that of RDMA devices.
func (f *Fabric) Attr() ibv.ProviderAttr { return ibv.ProviderAttr{} }

// Devices returns the one device.
func (f *Fabric) Devices() ([]ibv.Device, error) { return []ibv.Device{&f.dev}, nil }

// number returns the number for a new queue pair. The caller holds mu.
func (f *Fabric) number() uint32 {
	f.lastQPN++
	return f.lastQPN
}
