package regmem

import (
	"errors"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// A Domain is a protection domain of a device with the memory that is registered there.
// Its exported fields do not change after [Acquire].
type Domain struct {
	Dev     ibv.Device // Dev is the device.
	PD      ibv.PD     // PD is where users create queue pairs and address handles.
	Budget  *Budget    // Budget is the device's.
	Private bool       // Private is set where the Domain has one user, and keys open memory to all its peers.

	advice    Advice
	lasting   bool // A lasting domain outlives its last user by domains.idle.
	unchecked bool // Peers may read all that is registered: ibv.Quirks.ReadsUnchecked.

	// domains.mu guards these fields.
	users int
	epoch uint64 // epoch counts the calls of Acquire, and ends with retire.

	mu     sync.Mutex
	pools  map[poolKey]*Pool    // pools has a pool for each size of a buffer.
	cached map[*Memory]struct{} // cached is the memory that stays registered here.
}

// domains has the shared domains of the process.
var domains = struct {
	mu     sync.Mutex
	shared map[ibv.Device]*Domain
	live   int           // live counts shared and private domains.
	idle   time.Duration // idle is how long a lasting domain outlives its last user.
}{shared: make(map[ibv.Device]*Domain), idle: time.Second}

// Acquire returns a Domain of the device with one reference, which ends with
// [Domain.Release]. The Domain is shared with other users, or private, as the device
// demands.
//
// If lasting is set, a new shared Domain stays for a second after its last user has
// released it. So a program that connects again and again does not map and register
// memory each time. Without lasting the device has everything back as soon as the last
// user has released it, as the owner of a device may want to close it then.
//
// Errors name the settings of advice. Acquire itself fails only as AllocPD of the
// device does.
func Acquire(dev ibv.Device, lasting bool, advice Advice) (*Domain, error) {
	if !dev.Attr().Caps.Has(ibv.CapQPRegion) {
		d, err := newDomain(dev, advice)
		if err != nil {
			return nil, err
		}
		d.Private, d.users = true, 1
		domains.mu.Lock()
		domains.live++
		domains.mu.Unlock()
		return d, nil
	}
	domains.mu.Lock()
	defer domains.mu.Unlock()
	d := domains.shared[dev]
	if d == nil {
		var err error
		if d, err = newDomain(dev, advice); err != nil {
			return nil, err
		}
		d.lasting = lasting
		domains.shared[dev] = d
		domains.live++
	}
	d.users++
	d.epoch++
	return d, nil
}

func newDomain(dev ibv.Device, advice Advice) (*Domain, error) {
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, err
	}
	return &Domain{Dev: dev, PD: pd, Budget: acquireBudget(dev), advice: advice,
		unchecked: dev.Attr().Quirks.ReadsUnchecked, pools: make(map[poolKey]*Pool)}, nil
}

// Retain takes another reference, which ends with [Domain.Release] too. The caller knows
// of a reference that does not end meanwhile.
func (d *Domain) Retain() {
	domains.mu.Lock()
	d.users++
	domains.mu.Unlock()
}

// Release ends a reference. All buffers that were taken by way of it have been released,
// and all registrations have been closed. The last reference frees the memory of a private
// Domain, and that of a shared one at once or a second later, as lasting of [Acquire]
// says. Release returns the errors of the device in that case. Memory that the device did
// not let go of stays mapped for good.
func (d *Domain) Release() error {
	domains.mu.Lock()
	defer domains.mu.Unlock()
	d.users--
	switch {
	case d.users > 0:
		return nil
	case d.Private:
		// No other user can find a private domain, so the lock is not needed for its end.
		domains.mu.Unlock()
		err := d.free()
		domains.mu.Lock()
		domains.live--
		return err
	case !d.lasting:
		return d.retire()
	}
	epoch := d.epoch
	time.AfterFunc(domains.idle, func() {
		domains.mu.Lock()
		defer domains.mu.Unlock()
		if d.users == 0 && d.epoch == epoch {
			d.retire()
		}
	})
	return nil
}

// retire ends a shared domain. The caller holds domains.mu.
func (d *Domain) retire() error {
	d.epoch++ // A timer that has not fired yet finds another epoch.
	delete(domains.shared, d.Dev)
	domains.live--
	return d.free()
}

// free gives back all that a domain without users has.
func (d *Domain) free() error {
	d.Budget.release(d.Dev)
	errs := []error{d.forgetMemory()}
	for _, p := range d.pools {
		errs = append(errs, p.close())
	}
	return errors.Join(append(errs, d.PD.Close())...)
}

// forgetMemory closes the registrations of Memory that the domain keeps.
func (d *Domain) forgetMemory() error {
	d.mu.Lock()
	kept := make([]*Memory, 0, len(d.cached))
	for m := range d.cached {
		kept = append(kept, m)
	}
	d.cached = nil
	d.mu.Unlock()
	var errs []error
	for _, m := range kept {
		errs = append(errs, m.forget(d))
	}
	return errors.Join(errs...)
}
